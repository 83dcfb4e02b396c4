"""Makes a release: checks, version, changelog, build, SBOM, provenance. It changes nothing outside dist/.

    make release VERSION=0.2.0
    python scripts/release.py verify dist/tampu-0.2.0.provenance.json

The version must stand in pyproject.toml and src/tampu/__init__.py, and CHANGELOG.md must have a dated section for it
with nothing left under "Unreleased". The packages are built from what is committed, with the locked build tools and no
build isolation, installed into an empty environment and started there once; the SBOM (CycloneDX) describes that
environment. The provenance (an in-toto statement with a SLSA predicate, not signed) has the SHA-256 of each file, the
commit, the locks and the versions of the tools; `verify` compares it with the files next to it. Another build of the
commit with these tools gives the same packages. Tagging and uploading stay with a person; the commands are printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

PROJECT = Path(__file__).parents[1]
DIST = PROJECT / "dist"
TOOLS = PROJECT / "build" / "release-tools"
INSTALLED = PROJECT / "build" / "release-installed"


class Refused(Exception):  # noqa: N818 - said to people as "release: ..."
    """The release cannot be made; the text says what to do."""


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["verify"]:
        return verify([Path(each) for each in arguments[1:]])
    try:
        version = arguments[0] if arguments else project_version()
        check_version(version)
        check_changelog(version, (PROJECT / "CHANGELOG.md").read_text())
        check_clean()
        run("make", "check")
        tools = install_tools()
        packages = build(tools)
        environment = check_packages(tools, packages, version)
        bill = write_bill_of_materials(tools, environment, version)
        provenance = write_provenance(tools, [*packages, bill], version)
        check_provenance(provenance)
    except (Refused, subprocess.CalledProcessError) as reason:
        print(f"release: {reason}", file=sys.stderr)
        return 1
    print(f"release: {version} is ready:")
    for path in (*packages, bill, provenance):
        print(f"  {path.relative_to(PROJECT)}  {path.stat().st_size:,} bytes")
    print("release: CI must be green for this commit. Then:")
    print(f"  git tag --annotate v{version} --message 'tampu {version}' && git push origin v{version}")
    print(f"  {tools / 'twine'} upload {' '.join(str(path.relative_to(PROJECT)) for path in packages)}")
    return 0


def project_version() -> str:
    version: str = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    return version


def check_version(version: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"{version!r} is not a version such as 1.2.3 or 1.2.3rc1")
    module = (PROJECT / "src" / "tampu" / "__init__.py").read_text()
    found = {"pyproject.toml": project_version(), "src/tampu/__init__.py": ""}
    if match := re.search(r'^__version__ = "(.+)"$', module, re.MULTILINE):
        found["src/tampu/__init__.py"] = match[1]
    for path, said in found.items():
        if said != version:
            raise Refused(f"{path} says version {said or 'nothing'}, not {version}: change it and commit")


def check_changelog(version: str, text: str) -> None:
    """Refuse unless the version has a dated section of its own and nothing is left unreleased."""
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE):
        raise Refused(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD': rename 'Unreleased' and commit")
    unreleased = re.search(r"^## Unreleased$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        raise Refused(f"CHANGELOG.md still has entries under 'Unreleased': move them to {version} and commit")


def check_clean() -> None:
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout
    if changed:
        raise Refused(f"there are changes that are not committed:\n{changed.rstrip()}")


def install_tools() -> Path:
    """Make the environment of the release tools from their lock; return the folder of its programs."""
    venv.create(TOOLS, with_pip=True, clear=True)
    for lock in ("build", "release"):
        path = PROJECT / "requirements" / f"{lock}.txt"
        run(str(TOOLS / "bin" / "pip"), "install", "--quiet", "--require-hashes", "--no-deps", "-r", str(path))
    return TOOLS / "bin"


def build(tools: Path) -> list[Path]:
    """Build from what is committed, and nothing that lies about; the times in the archives are the commit's."""
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.strip()
    for old in DIST.glob("tampu-*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        archive, source = Path(scratch) / "source.tar", Path(scratch) / "source"
        run("git", "archive", "--output", str(archive), "HEAD")
        with tarfile.open(archive) as packed:
            packed.extractall(source, filter="data")
        run(
            *(str(tools / "python"), "-m", "build", "--no-isolation", "--outdir", str(DIST), str(source)),
            SOURCE_DATE_EPOCH=epoch,
        )
    return sorted(DIST.glob("tampu-*.whl")) + sorted(DIST.glob("tampu-*.tar.gz"))


def check_packages(tools: Path, packages: list[Path], version: str) -> Path:
    """Check the packages' metadata, install the wheel with its locked dependencies, and return that environment."""
    run(str(tools / "twine"), "check", "--strict", *map(str, packages))
    venv.create(INSTALLED, with_pip=False, clear=True)
    locked = (PROJECT / "requirements" / "dev.txt").read_text()
    versions = INSTALLED / "constraints.txt"  # without hashes: the wheel that was just built has none
    versions.write_text("".join(line.removesuffix(" \\\n") + "\n" for line in locked.splitlines(True) if "==" in line))
    pip = (str(tools / "pip"), "--disable-pip-version-check", "--python", str(INSTALLED / "bin" / "python"))
    run(*pip, "install", "--quiet", "-c", str(versions), str(packages[0]))
    said = subprocess.run(
        [INSTALLED / "bin" / "tampu", "--version"], check=True, capture_output=True, text=True, cwd=INSTALLED
    ).stdout.strip()
    if said != f"tampu {version}":
        raise Refused(f"the installed wheel says {said!r}")
    return INSTALLED


def write_bill_of_materials(tools: Path, environment: Path, version: str) -> Path:
    """Write what a user installs with the wheel: each package with its version, license and dependencies."""
    path = DIST / f"tampu-{version}.cdx.json"
    described = ("--pyproject", str(PROJECT / "pyproject.toml"), "--output-reproducible", "--of", "JSON")
    run(str(tools / "cyclonedx-py"), "environment", *described, "-o", str(path), str(environment / "bin" / "python"))
    return path


def write_provenance(tools: Path, files: list[Path], version: str) -> Path:
    """Write which commit, locks and tools the files were made from, next to them."""
    freeze = subprocess.run(
        [tools / "python", "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    locks = [PROJECT / "requirements" / f"{name}.txt" for name in ("build", "dev", "release")]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": sha256(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:tampu:make-release:v1",
                "externalParameters": {"version": version},
                "resolvedDependencies": [
                    {"name": "tampu", "digest": {"gitCommit": commit()}},
                    *({"name": f"requirements/{lock.name}", "digest": {"sha256": sha256(lock)}} for lock in locks),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:tampu:make-release",
                    "version": {
                        "python": platform.python_version(),
                        **{each["name"]: each["version"] for each in json.loads(freeze)},
                    },
                },
            },
        },
    }
    path = DIST / f"tampu-{version}.provenance.json"
    path.write_text(json.dumps(statement, indent=2) + "\n")
    return path


def check_provenance(path: Path) -> None:
    """Refuse unless the files next to a provenance are those that it names."""
    try:
        subjects = {each["name"]: each["digest"]["sha256"] for each in json.loads(path.read_text())["subject"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Refused(f"{path} is not a provenance: {error!r}") from error
    if not subjects:
        raise Refused(f"{path} names no files")
    for name, digest in subjects.items():
        file = path.parent / Path(name).name
        if not file.is_file():
            raise Refused(f"{file} is missing, and {path.name} names it")
        if sha256(file) != digest:
            raise Refused(f"{file} is not the file that was built: its SHA-256 is {sha256(file)}, not {digest}")


def verify(paths: list[Path]) -> int:
    try:
        if not paths:
            raise Refused("name a provenance: verify dist/tampu-0.2.0.provenance.json")
        for path in paths:
            check_provenance(path)
            print(f"release: the files next to {path} are those that were built")
    except Refused as reason:
        print(f"release: {reason}", file=sys.stderr)
        return 1
    return 0


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(*command: str, **environment: str) -> None:
    print(f"release: {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=PROJECT, check=True, env=os.environ | environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
