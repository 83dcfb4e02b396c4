"""`tampu new`: the projects it writes are run for real: their tests, their worker, their one command, type checkers."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from cli.lab import PATIENCE_SECS, invoke, run_program, worker_program
from servers.process import eventually, free_port
from tampu.cli.commands import new as command
from tampu.cli.commands.new import MAX_NAME, TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
KINDS = ("plain", "fastapi", "django")
FLAGS = {"plain": [], "fastapi": ["--fastapi"], "django": ["--django"]}
#: As long as a name may be: no line of the project may become too long for its linter.
LONG_NAME = "a-name-that-is-just-as-long-as-it-may-be"


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A project of each kind, named corner-shop."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        assert run_program("new", "corner-shop", *FLAGS[kind], cwd=folder).code == 0
        found[kind] = folder / "corner-shop"
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def project(kind: str, projects: dict[str, Path]) -> Path:
    return projects[kind]


def run(project: Path, *command: str | Path, **environment: str) -> str:
    """Run a Python module in a project; its output. Fails if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=os.environ | {"NO_COLOR": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- the project works


def test_its_own_tests_pass(project: Path, kind: str) -> None:
    said = run(project, "pytest", "-q", "-p", "no:cacheprovider")
    expected = {"plain": 3, "fastapi": 6, "django": 6}
    assert re.search(rf"^{expected[kind]} passed", said, re.MULTILINE), said


def test_types_and_style_are_clean(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run(project, "ruff", "check", "--no-cache")
    run(project, "ruff", "format", "--check", "--no-cache")
    cache = tmp_path_factory.getbasetemp() / "mypy-of-projects"
    assert "Success" in run(project, "mypy", "--strict", "--cache-dir", cache)


def test_a_long_name_does_not_break_the_style(kind: str, tmp_path: Path) -> None:
    assert len(LONG_NAME) == MAX_NAME
    assert run_program("new", LONG_NAME, *FLAGS[kind], cwd=tmp_path).code == 0
    run(tmp_path / LONG_NAME, "ruff", "check", "--no-cache")
    run(tmp_path / LONG_NAME, "ruff", "format", "--check", "--no-cache")


def test_one_command_runs_the_plain_project(projects: dict[str, Path]) -> None:
    said = run(projects["plain"], "corner_shop")
    assert said == "welcome sent to ada@example.com\n{'to': 2, 'be': 2, 'or': 1, 'not': 1}\n"


@pytest.fixture
def site(projects: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a project that its one command serves; ends with Ctrl-C."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "corner_shop"],
        cwd=projects[request.param],
        env=os.environ | {"PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: ask(f"{address}/"), "the project answers")
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECS) == 0
    finally:
        process.kill()
        process.wait()


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    """The status and JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@pytest.mark.parametrize("site", ["fastapi"], indirect=True)
def test_one_command_serves_the_api_with_a_worker(site: str) -> None:
    assert ask(f"{site}/word-counts", {"text": "to be or not to be"}) == (200, {"to": 2, "be": 2, "or": 1, "not": 1})
    status, added = ask(f"{site}/welcomes", {"email": "ada@example.com"})
    assert status == 202
    address = f"{site}/jobs/{added['job']}"
    eventually(lambda: ask(address)[1]["state"] == "done", "the job is done")
    assert ask(address)[1]["result"] == "welcome sent to ada@example.com"
    assert ask(f"{site}/jobs/no-such-job")[0] == 404


@pytest.mark.parametrize("site", ["django"], indirect=True)
def test_one_command_serves_the_django_project_with_a_worker(site: str) -> None:
    status, added = ask(f"{site}/signups", {"email": "ada@example.com"})
    assert status == 202
    eventually(lambda: ask(site + added["status"])[1]["welcomed_at"], "the welcome is sent")
    assert ask(f"{site}/signups", {"email": "ada@example.com"})[0] == 200
    assert ask(f"{site}/signups/1")[0] == 404
    assert ask(f"{site}/signups", {"email": "no address"})[0] == 400


#: What a deployment of the Django project sets.
DJANGO_PRODUCTION = {"DJANGO_SETTINGS_MODULE": "corner_shop.settings", "PYTHONPATH": ".", "SECRET_KEY": "key"}


def migrate(project: Path) -> None:
    run(project, "django", "migrate", **DJANGO_PRODUCTION)


def test_the_django_project_is_in_debug_mode_only_on_request(projects: dict[str, Path]) -> None:
    def said(**environment: str) -> str:
        program = "from django.conf import settings as s; print(s.DEBUG, len(s.SECRET_KEY) > 32)"
        return run(projects["django"], "django", "shell", "-c", program, **DJANGO_PRODUCTION | environment)

    assert "False False" in said()
    assert "False False" in said(DEBUG="true")
    assert "True True" in said(DEBUG="1", SECRET_KEY="")
    assert "True False" in said(DEBUG="1")


def test_the_django_project_without_a_secret_key_says_what_to_set(projects: dict[str, Path]) -> None:
    for program in (["-m", "django", "check"], ["-c", "import corner_shop.wsgi"]):
        done = subprocess.run(
            [sys.executable, *program],
            cwd=projects["django"],
            env=os.environ | DJANGO_PRODUCTION | {"SECRET_KEY": ""},
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 1
        assert "set SECRET_KEY to a long random text, or DEBUG=1 for development" in done.stderr
    worker = run_program("worker", "corner_shop.worker:worker", cwd=projects["django"])
    assert worker.code != 0
    assert "set SECRET_KEY to a long random text" in worker.err


def test_its_worker_runs_a_job_as_in_its_container(project: Path, kind: str, url: str) -> None:
    command = dockerfile(project)["CMD"][0]
    program, *arguments = json.loads(command)
    assert program == "tampu"
    arguments = ["0" if one == "8080" else "127.0.0.1" if one == "0.0.0.0" else one for one in arguments]
    payload: dict[str, object] = {"text": "to be"}
    job, result = "count_words", "{'to': 1, 'be': 1}"
    if kind == "django":
        migrate(project)
        job, payload, result = "delete_old_signups", {"days": 5}, "0"
    with worker_program(project, *arguments[1:], SECRET_KEY="key") as worker:
        added = run_program("add", "corner-shop", job, json.dumps(payload), "--wait", "20s", cwd=project)
        assert added.code == 0, added.err + worker.log
        assert eval(added.out.splitlines()[-1]) == eval(result)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.log


PROCESS_TASK = """

@queue.task(process=True, attempts=1)
def count_signups() -> int:
    return Signup.objects.filter(email="nobody").count()
"""


@pytest.mark.usefixtures("url")
def test_a_process_of_the_django_worker_can_use_models(projects: dict[str, Path], tmp_path: Path) -> None:
    project = tmp_path / "corner-shop"
    shutil.copytree(projects["django"], project)
    with (project / "corner_shop" / "tasks.py").open("a") as tasks:
        tasks.write(PROCESS_TASK)
    migrate(project)
    with worker_program(project, "corner_shop.worker:worker", SECRET_KEY="key") as worker:
        added = run_program("add", "corner-shop", "count_signups", "{}", "--wait", "20s", cwd=project)
        assert (added.code, added.out.splitlines()[-1:]) == (0, ["0"]), added.err + worker.log


def test_the_migration_of_the_django_project_is_complete(projects: dict[str, Path]) -> None:
    project = projects["django"]
    said = run(project, "django", "makemigrations", "--check", **DJANGO_PRODUCTION)
    assert said == "No changes detected\n"


# --- deployment, as far as it can be checked without an engine


def documented_stop_timeout() -> int:
    page = (ROOT / "docs" / "how-to" / "deploy-and-shutdown.md").read_text()
    [seconds] = set(re.findall(r"TimeoutStopSec=(\d+)", page))
    return int(seconds)


def dockerfile(project: Path) -> dict[str, list[str]]:
    """The instructions of the Dockerfile, by their names."""
    found: dict[str, list[str]] = {}
    for line in (project / "Dockerfile").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest)
    return found


def test_the_image_gets_the_files_it_copies(project: Path) -> None:
    instructions = dockerfile(project)
    assert instructions.keys() == {"FROM", "WORKDIR", "RUN", "COPY", "USER", "CMD"}
    ignored, *rules = (project / ".dockerignore").read_text().split()
    assert ignored == "*"
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    sources = [source for copy in instructions["COPY"] for source in copy.split()[:-1]]
    assert sorted(sources) == sorted(kept)
    for source in sources:
        assert (project / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in kept)


def test_the_image_installs_what_the_project_imports(project: Path, kind: str) -> None:
    metadata = (project / "pyproject.toml").read_text()
    [runtime] = re.findall(r"^dependencies = (\[.*\])$", metadata, re.MULTILINE)
    names = {re.split(r"[><=\[]", name)[0] for name in json.loads(runtime)}
    imported = set()
    for module in (project / "corner_shop").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:from|import) (\w+)", module.read_text(), re.MULTILINE))
    others = imported - sys.stdlib_module_names - {"corner_shop", "pydantic"}  # pydantic comes with FastAPI
    assert others <= names, kind


def test_compose_starts_what_the_project_has(project: Path, kind: str) -> None:
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    services = compose["services"]
    expected = {"plain": set(), "fastapi": {"api"}, "django": {"web", "migrate"}}
    assert services.keys() == {"redis", "worker"} | expected[kind]
    assert services["worker"]["stop_grace_period"] == f"{documented_stop_timeout()}s"
    assert "noeviction" in services["redis"]["command"]
    for service in services.values():
        assert service.keys() & {"image", "build"}
        assert service.get("depends_on", {}).keys() <= services.keys()
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"]
        if "build" in service:
            assert service["environment"]["TAMPU_URL"] == "redis://redis:6379"


def test_the_worker_of_systemd_gets_the_documented_time_to_stop(project: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(project / "deploy" / "corner-shop-worker.service")
    service = unit["Service"]
    assert int(service["TimeoutStopSec"]) == documented_stop_timeout()
    assert service["KillMode"] == "mixed"
    program, *arguments = shlex.split(service["ExecStart"])
    assert program.endswith("/bin/tampu")
    assert arguments == json.loads(dockerfile(project)["CMD"][0])[1 : len(arguments) + 1]


def test_systemd_accepts_the_units(project: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    units = list((project / "deploy").glob("*.service"))
    assert units
    for unit in units:
        # Programs are looked for, so they must be there: any will do.
        text = re.sub(r"^(ExecStart(?:Pre)?=)\S+", rf"\g<1>{sys.executable}", unit.read_text(), flags=re.MULTILINE)
        copy = tmp_path / unit.name
        copy.write_text(text)
        done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_readme_names_files_that_are_there(project: Path) -> None:
    named = re.findall(
        r"`((?:corner_shop|deploy)/[\w./-]*|Dockerfile|compose\.yaml)`", (project / "README.md").read_text()
    )
    assert len(named) >= 4
    assert [name for name in named if not (project / name).exists()] == []


# --- the command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_says_what_to_do_next(here: Path) -> None:
    done = invoke("new", "shop", "--fastapi")
    files = [path for path in (here / "shop").rglob("*") if path.is_file()]
    assert done.code == 0
    assert done.out.splitlines()[0] == f"created shop/ with {len(files)} files"
    for step in ("cd shop", "pip install -e '.[dev]'", "python -m shop", "python -m pytest"):
        assert f"\n  {step} " in done.out or f"\n  {step}\n" in done.out


def test_no_name_of_the_template_is_left(project: Path) -> None:
    for path in project.rglob("*"):
        assert "sample" not in path.name
        if path.is_file() and path.suffix not in (".pyc", ".db"):
            assert "sample" not in path.read_text()


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "shop").mkdir()
    (here / "shop" / "notes.txt").write_text("mine")
    (here / "file").write_text("mine")
    for name in ("shop", "file"):
        done = invoke("new", name)
        assert done.code == 1
        assert done.complaint == (
            f"tampu: {name} already exists, and nothing is overwritten; choose another name or remove it"
        )
    assert sorted(path.name for path in here.rglob("*")) == ["file", "notes.txt", "shop"]


def test_an_empty_folder_is_filled(here: Path) -> None:
    (here / "shop").mkdir()
    assert invoke("new", "shop").code == 0
    assert (here / "shop" / "pyproject.toml").exists()


def test_a_project_that_cannot_be_written_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, text: str, **_: Any) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", fail)
    done = invoke("new", "shop")
    assert done.code == 1
    assert "No space left on device" in done.complaint
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("My Shop", "; try my-shop"),
        ("shop-", "; try shop"),
        ("1shop", "; try shop"),
        ("../shop", "; try shop"),
        ("a--b", "; try a-b"),
        ("ñandú", "must be lowercase letters"),
        ("x" * (MAX_NAME + 1), f"at most {MAX_NAME} characters"),
        ("", "must be lowercase letters"),
        ("class", "Python has a keyword or module 'class'"),
        ("json", "Python has a keyword or module 'json'"),
        ("django", "the project uses 'django' itself"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(here: Path, name: str, why: str) -> None:
    done = invoke("new", name)
    assert done.code == 2
    assert why in done.complaint
    assert list(here.iterdir()) == []


def test_one_kind_of_project_at_a_time(here: Path) -> None:
    done = invoke("new", "shop", "--fastapi", "--django")
    assert done.code == 2
    assert done.complaint == "tampu: --fastapi and --django cannot be combined; choose one"


def test_the_templates_are_in_the_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=110,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    templates = [path for path in TEMPLATES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(source)) for path in templates} <= names


def test_compiled_templates_are_left_out(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """pip compiles every file of a package."""
    copy = tmp_path_factory.mktemp("installed") / "templates"
    shutil.copytree(TEMPLATES, copy)
    subprocess.run([sys.executable, "-m", "compileall", "-q", copy], check=True)
    assert list(copy.rglob("*.pyc"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "TEMPLATES", copy)
        assert invoke("new", "shop").code == 0
    assert list((here / "shop").rglob("*.pyc")) == []
