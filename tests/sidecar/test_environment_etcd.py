"""An etcd for the tests: the machine's own, else its distribution's, unpacked and not installed."""

from pathlib import Path

import pytest

from midstream.session.errors import EngineError
from midstream.sidecar.environment_etcd import etcd

APT = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
  *Dir::State::Lists=*download*) touch etcd-server_3_amd64.deb ;;
  download*) [ {plain} = 0 ] || {{ echo "E: Unable to locate package etcd-server"; exit {plain}; }}
    touch etcd-server_3_amd64.deb ;;
esac
"""
DPKG = """#!/bin/sh
mkdir -p "$3/usr/bin"
printf '#!/bin/sh\\necho etcd Version: 3\\n' > "$3/usr/bin/etcd"
chmod +x "$3/usr/bin/etcd"
"""


def told(text: str) -> None:
    pass


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    folder.mkdir()
    for name, text in scripts.items():
        file = folder / name.replace("_", "-")
        file.write_text(text)
        file.chmod(0o755)
    for name in ("env", "sh", "touch", "mkdir", "chmod"):
        (folder / name).symlink_to(Path("/usr/bin") / name)
    monkeypatch.setenv("PATH", str(folder))


def test_the_etcd_of_the_machine_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path / "bin", monkeypatch, etcd="#!/bin/sh\n")
    assert etcd(tmp_path / "place", told) == tmp_path / "bin" / "etcd"
    assert not (tmp_path / "place").exists()


def test_where_there_is_none_and_no_apt_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools(tmp_path / "bin", monkeypatch)
    with pytest.raises(EngineError, match=r"no apt-get to get one; install etcd 3\.4 or newer"):
        etcd(tmp_path / "place", told)


@pytest.mark.parametrize(("plain", "calls"), [(0, 1), (100, 3)])
def test_the_package_is_unpacked_also_where_the_machine_has_no_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: int, calls: int
) -> None:
    log = tmp_path / "log"
    tools(tmp_path / "bin", monkeypatch, apt_get=APT.format(log=log, plain=plain), dpkg_deb=DPKG)
    found = etcd(tmp_path / "place", told)
    assert found == tmp_path / "place" / "root" / "usr" / "bin" / "etcd"
    assert etcd(tmp_path / "place", told) == found
    asked = log.read_text().splitlines()
    assert len(asked) == calls, asked
    assert [line.split()[-1] for line in asked][-1] == "etcd-server"
    assert sorted(path.name for path in (tmp_path / "place").iterdir()) == ["complete", "root"]
