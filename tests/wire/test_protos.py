"""What is generated is what protoc makes of protos/ today, and the bytes are those of version 1."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wire.samples import encoded

REPOSITORY = Path(__file__).parents[2]
GENERATED = Path("halos/wire/v1")
GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools", reason="only who changes protos/ needs the generator")
    folder = tmp_path_factory.mktemp("generated")
    sources = sorted((REPOSITORY / "protos" / GENERATED).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{REPOSITORY / 'protos'}"]
    command += [f"--python_out={folder}", f"--pyi_out={folder}", *map(str, sources)]
    subprocess.run(command, check=True)
    return folder / GENERATED


@pytest.mark.skipif(not (REPOSITORY / "protos").is_dir(), reason="protos/ are not beside the tests")
def test_what_is_committed_is_what_make_protos_generates(generated: Path) -> None:
    names = sorted(path.name for path in generated.iterdir())
    committed = REPOSITORY / GENERATED
    assert names == sorted(path.name for path in committed.glob("*_pb2.py*"))
    for name in names:
        assert (generated / name).read_text() == (committed / name).read_text(), (
            f"make protos: {name}"
        )


def test_the_format_has_not_changed() -> None:
    """Who adds to the format adds to golden.json; what is in it already stays as it is.

    ``python -c "import json; from tests.wire.samples import encoded as e; print(json.dumps(e(),
    indent=0))" > tests/wire/golden.json`` writes it.
    """
    assert encoded() == GOLDEN
