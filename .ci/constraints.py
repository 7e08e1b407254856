"""Writes constraints.txt anew: what the extra `dev`, which holds all others that tests need, resolves to today.

    python .ci/constraints.py python3.11 python3.12

One interpreter for each side of the line that the newest jax draws between Python versions.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# The versions that the tests pass with, on Python 3.11 and on 3.12. Made by `make constraints`; not edited by hand.
# torch pins what its CUDA builds need by itself: see the extra `oracles` in setup.py.
"""
PINNED_BY_TORCH = ("cuda-", "nvidia-", "triton")


def resolve(interpreter: str) -> dict[str, str]:
    """Package -> version, resolved from nothing in a fresh environment of this interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        venv, report = Path(scratch, "venv"), Path(scratch, "report.json")
        subprocess.run([interpreter, "-m", "venv", venv], check=True)
        pip = [venv / "bin/python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "--dry-run", "--report", report, f"{ROOT}[dev]"], check=True)
        found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    # A local version ("+cpu") is one index's way of building what all of them call by the public version.
    versions = {package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in found}
    return {name: v for name, v in versions.items() if name != "hpnlp" and not name.startswith(PINNED_BY_TORCH)}


def main(older: str, newer: str) -> None:
    before, after = resolve(older), resolve(newer)
    lines = []
    for name in sorted(before | after):
        if before.get(name) == after.get(name):
            lines.append(f"{name}=={before[name]}\n")
            continue
        for versions, marker in ((before, '< "3.12"'), (after, '>= "3.12"')):
            if name in versions:
                lines.append(f"{name}=={versions[name]} ; python_version {marker}\n")
    (ROOT / "constraints.txt").write_text(HEADER + "".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
