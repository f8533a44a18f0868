"""An engine's server on a simulated GPU: `python -m support.sim_server CUDA_SOCKET PORT --held GPU-0=BYTES [--sleeps]`.

It answers completions by what lies in its device memory: an answer is the same exactly if that is. SIGUSR1 damages it.
"""

import argparse
import json
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.sim_cuda import SimProcess

WEIGHT = 48271


def serve(cuda: SimProcess, port: int, *, sleeps: bool) -> None:
    """Until killed."""
    asleep: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/is_sleeping":
                self._answer({"is_sleeping": bool(asleep)}, 200 if sleeps else 404)
                return
            self._answer({"data": [{"id": "m"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            if self.path in ("/sleep?level=1", "/wake_up"):
                asleep[:] = ["yes"] if self.path != "/wake_up" else []
                self._answer({}, 200 if sleeps else 404)
                return
            if asleep and sleeps:
                self._answer({}, 503)
                return
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with cuda.call() as device:
                ids = [(len(asked["prompt"]) * device["weight"] ** n) % 32003 for n in range(1, asked["max_tokens"])]
            self._answer({"choices": [{"text": "words", "token_ids": ids}]})

        def _answer(self, body: dict[str, Any], status: int = 200) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("port", type=int)
    parser.add_argument("--held", action="append", default=[])
    parser.add_argument("--sleeps", action="store_true")
    options = parser.parse_args()
    held = {uuid: int(size) for uuid, _, size in (text.partition("=") for text in options.held)}
    cuda = SimProcess(options.socket, held)
    cuda.device["weight"] = WEIGHT

    def damage(*_: object) -> None:
        # Where it lies now: on the device, or in the image.
        for memory in (cuda.device, cuda._image):
            if "weight" in memory:
                memory["weight"] += 1

    signal.signal(signal.SIGUSR1, damage)
    serve(cuda, options.port, sleeps=options.sleeps)


if __name__ == "__main__":
    main()
