"""Repairing dead letters with SQL, and contracts on payloads: no Spark, except for the table of outcomes."""

from __future__ import annotations

import base64
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cli.lab import Done, invoke
from tampu.errors import ConfigError
from tampu.spark.lake.contracts import Contracts, check_queue
from tampu.spark.lake.folder import LakeVersion
from tampu.spark.lake.pipeline import Pipeline
from tampu.spark.lake.repair import find_letters, repairs_of
from tampu.spark.lake.report import write_report
from tampu.spark.lake.rows import query, read_rows
from tampu.wire.codec import QueueCodec, SignedCodec
from tampu.wire.dlq import cluster_id, fingerprint
from tampu.wire.entry import read_job_fields
from tampu.wire.envelope import decode_job
from tampu.wire.events import encode_event_fields
from tampu.wire.payload import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spark.filling import Filled

ERROR = "could not convert string to float: '5 EUR'"
CLUSTER = cluster_id("retries_exhausted", "ValueError", "could not convert string to float: <text>")
SQL = "SELECT * REPLACE (CAST(replace(amount, ' EUR', '') AS DOUBLE) AS amount) FROM letters"


def bad_letters(filled: Filled, count: int, first: int = 0, queue: str = "q") -> None:
    for number in range(first, first + count):
        payload = {"amount": f"{number} EUR", "to": {"iban": f"DE{number}"}}
        filled.letter(f"pay-{number}", payload, queue, error=ERROR)


def repair(filled: Filled, *options: str, sql: str = SQL) -> Done:
    return invoke("dlq", "repair", "q", "--cluster", CLUSTER, "--sql", sql, "--url", filled.url, *options)


@pytest.fixture
def worker(filled: Filled) -> Iterator[Any]:
    """Runs jobs as a worker does, as far as the server can tell: a job ends as `ends` says."""
    ends: dict[str, str] = {}
    stopped = threading.Event()
    client = filled.server.client()
    keys = filled.keys()

    def work() -> None:
        while not stopped.wait(0.02):
            for entry_id, fields in client.execute_command("XRANGE", keys.stream, "-", "+", NEVER_DECODE=[]):
                flat = [part for pair in fields.items() for part in pair] if isinstance(fields, dict) else fields
                envelope, name = read_job_fields(flat)
                job = decode_job(envelope or b"", name)
                event = ends.get(job.id, "completed")
                told = encode_event_fields(event, job.id, 1_750_000_000_000, name, {"attempt": 1, "duration_us": 5})
                client.execute_command("XADD", keys.events, "*", *told)
                client.xdel(keys.stream, entry_id)

    thread = threading.Thread(target=work)
    thread.start()
    yield ends
    stopped.set()
    thread.join()


# --- what would change


def test_sql_changes_fields_and_leaves_the_rest_as_it_is(filled: Filled) -> None:
    bad_letters(filled, 3)
    filled.letter("other", {"amount": "x"}, error="no customer")
    odd = {"amount": "9 EUR", "at": [1, {}], "raw": b"\xff", "mixed": 5, "Amount": "hidden", 7: "key"}
    filled.letter("odd", odd, error=ERROR)
    filled.letter("text", {"mixed": "five"}, error=ERROR)
    letters = find_letters(filled.url, "q", CLUSTER)
    assert [letter.job.id for letter in letters] == ["pay-0", "pay-1", "pay-2", "odd", "text"]
    plan = repairs_of(letters, SQL)
    assert plan.unchanged == 1  # without an amount
    assert [one.payload["amount"] for one in plan.repairs] == [0.0, 1.0, 2.0, 9.0]
    assert plan.repairs[1].changes == {"amount": ("1 EUR", 1.0)}
    assert plan.repairs[1].payload["to"] == {"iban": "DE1"}
    assert plan.repairs[3].payload == odd | {"amount": 9.0}
    new = repairs_of(letters, "SELECT _entry_id, 'EUR' AS currency, 'pay' AS _name FROM letters WHERE amount = '1 EUR'")
    assert (new.repairs[0].payload["currency"], new.repairs[0].name, new.left_out) == ("EUR", "pay", 4)


def test_payloads_without_fields_are_replaced_as_json(filled: Filled) -> None:
    filled.letter("list", [1, "2"], error=ERROR)
    letters = find_letters(filled.url, "q", CLUSTER)
    (one,) = repairs_of(letters, "SELECT _entry_id, replace(_payload, '\"2\"', '2') AS _payload FROM letters").repairs
    assert one.payload == [1, 2]


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("SELECT nothing FROM letters", "nothing"),
        ("SELECT amount FROM letters", "_entry_id"),
        ("SELECT '1-1' AS _entry_id FROM letters", "no letter '1-1'"),
        ("SELECT * FROM letters UNION ALL SELECT * FROM letters", "more than once"),
        ("SELECT _entry_id, 'x' AS _job_id FROM letters", "_job_id, which cannot be changed"),
        ("SELECT _entry_id, 'x' AS _payload FROM letters", "must be JSON"),
        ("COPY letters TO 'letters.csv'", "must start with SELECT, WITH or VALUES"),
    ],
)
def test_sql_that_makes_no_sense_is_refused(filled: Filled, sql: str, named: str) -> None:
    bad_letters(filled, 1)
    with pytest.raises(ConfigError, match=named):
        repairs_of(find_letters(filled.url, "q", CLUSTER), sql)
    done = repair(filled, "--yes", sql=sql)
    assert done.code == 2
    assert filled.client.xlen(filled.keys().dlq) == 1


# --- the command


def test_a_dry_run_shows_the_changes_and_makes_none(filled: Filled) -> None:
    bad_letters(filled, 12)
    done = repair(filled, "--dry-run")
    assert done.code == 0
    assert '"3 EUR"' in done.out
    assert "3.0" in done.out
    assert "2 more letters" in done.err
    assert "would repair and replay 12 dead letters in q" in done.err
    assert filled.client.xlen(filled.keys().dlq) == 12
    assert "--yes" in repair(filled).err  # not a terminal
    assert filled.client.xlen(filled.keys().stream) == 0


def test_a_canary_that_completes_lets_the_others_follow(filled: Filled, worker: dict[str, str]) -> None:
    bad_letters(filled, 25)
    told = repair(filled, "--yes", "--json").json
    assert (told["matched"], told["changed"], told["replayed"]) == (25, 25, 25)
    assert told["canaries"] == {f"pay-{number}": "completed" for number in range(10)}
    assert filled.client.xlen(filled.keys().dlq) == 0


def test_a_repair_is_redacted_and_leaves_an_audit_event(
    filled: Filled, worker: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hooks_of_repair.py").write_text(
        "def keys_only(kind, value):\n    return dict.fromkeys(value, 'hidden')\n"
        "def nothing(kind, value):\n    return 'hidden'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TAMPU_OPERATOR", "ada")
    bad_letters(filled, 12)
    for hook in ("keys_only", "nothing"):
        monkeypatch.setenv("TAMPU_REDACT", f"hooks_of_repair:{hook}")
        for options in (("--dry-run",), ("--dry-run", "--json")):
            done = repair(filled, *options)
            assert "hidden" in done.out
            assert "EUR" not in done.out
            assert "3.0" not in done.out
    told = repair(filled, "--yes", "--json").json
    assert told["replayed"] == 12
    events: Any = filled.client.xrange(filled.keys().events)
    audits = [fields for _, fields in events if fields[b"e"] == b"audit"]
    assert [(event[b"action"], event[b"operator"], event[b"count"]) for event in audits] == [
        (b"replay", b"ada", b"10"),
        (b"replay", b"ada", b"2"),
    ]
    assert {event[b"detail"].decode() for event in audits} == {f"repair {told['repair']}"}


def test_a_canary_that_dies_stops_the_repair(filled: Filled, worker: dict[str, str]) -> None:
    bad_letters(filled, 25)
    worker["pay-3"] = "dlq"
    done = repair(filled, "--yes")
    assert done.code == 1
    assert "1 of the first 10 did not complete (pay-3); the rest stays dead" in done.err
    assert filled.client.xlen(filled.keys().dlq) == 15


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("dlq", 1)])
def test_fewer_letters_than_canaries_are_waited_for_too(
    end: str, code: int, filled: Filled, worker: dict[str, str]
) -> None:
    bad_letters(filled, 3)
    worker["pay-1"] = end
    done = repair(filled, "--yes", "--json")
    assert done.code == code
    assert done.json["canaries"] == {"pay-0": "completed", "pay-1": "dead" if code else end, "pay-2": "completed"}
    assert ("1 of the first 3 did not complete (pay-1)\n" in done.err) == bool(code)


def test_without_a_worker_the_rest_is_not_replayed(filled: Filled) -> None:
    bad_letters(filled, 4)
    done = repair(filled, "--yes", "--canary", "2", "--wait", "50ms")
    assert done.code == 1
    assert "2 of the first 2 did not end within 50ms; the rest stays dead: is a worker running?" in done.err
    assert filled.client.xlen(filled.keys().dlq) == 2
    assert repair(filled, "--yes", "--canary", "0").code == 0
    assert filled.client.xlen(filled.keys().dlq) == 0
    assert [payload["amount"] for payload in filled.payloads()] == [0.0, 1.0, 2.0, 3.0]


def test_an_unknown_cluster_and_a_folder_that_is_no_lake_are_refused(filled: Filled, tmp_path: Path) -> None:
    bad_letters(filled, 1)
    done = invoke("dlq", "repair", "q", "--cluster", "ffffffff", "--sql", SQL, "--url", filled.url)
    assert (done.code, "tampu dlq summary q" in done.err) == (2, True)
    assert "not a lake" in repair(filled, "--yes", "--lake", str(tmp_path)).err
    assert filled.client.xlen(filled.keys().dlq) == 1


@pytest.mark.spark_session
def test_the_lake_says_what_became_of_repaired_letters(
    spark: Any, filled: Filled, tmp_path: Path, worker: dict[str, str]
) -> None:
    bad_letters(filled, 12)
    pipeline = Pipeline(spark, filled.url, ["q"], tmp_path)
    pipeline.run()
    worker["pay-11"] = "dlq"
    told = repair(filled, "--yes", "--json", "--lake", str(tmp_path)).json
    keys = filled.keys()
    while filled.client.xlen(keys.stream):  # the worker of this test ends all of them
        pass
    pipeline.run()
    rows = {row["job_id"]: row for row in read_rows(tmp_path, "gold/repairs")}
    assert {row["repair"] for row in rows.values()} == {told["repair"]}
    assert {job_id: row["outcome"] for job_id, row in rows.items()} == {
        f"pay-{number}": "completed" if number < 11 else "dead" for number in range(12)
    }
    assert sum(row["is_canary"] for row in rows.values()) == 10
    assert json.loads(rows["pay-2"]["after"])["amount"] == 2.0
    # The second repair of a letter that died again has its own outcome, and does not change the first.
    bad_letters(filled, 1, first=11)
    repair(filled, "--yes", "--canary", "0", "--lake", str(tmp_path))
    pipeline.run()
    outcomes = "SELECT outcome, count(*) AS letters FROM gold_repairs GROUP BY outcome ORDER BY outcome"
    found = {row["outcome"]: row["letters"] for row in query(tmp_path, outcomes).to_pylist()}
    assert found["completed"] == 11
    assert sum(found.values()) == 13
    assert told["repair"] in write_report(tmp_path, tmp_path / "report.html").read_text()


# --- contracts

RULES = """
[invoice]
amount = {type = "number", min = 0}
customer = {type = "string", pattern = "C[0-9]+"}
currency = {one_of = ["EUR", "USD"], required = false}
tags = {type = ["array", "null"], max = 2, required = false}
"""


def test_each_rule_says_what_breaks_it(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    contracts = Contracts.load(tmp_path / "rules.toml")
    good = {"amount": 5, "customer": "C1", "more": "allowed"}
    assert contracts.violations("invoice", good) == []
    assert contracts.violations("other", {}) == []
    for change, broken in (
        ({"amount": "5"}, ("amount", "type")),
        ({"amount": True}, ("amount", "type")),
        ({"amount": -1}, ("amount", "min")),
        ({"customer": "X"}, ("customer", "pattern")),
        ({"currency": "GBP"}, ("currency", "one_of")),
        ({"tags": [1, 2, 3]}, ("tags", "max")),
    ):
        assert contracts.violations("invoice", good | change) == [broken]
    assert contracts.violations("invoice", {"customer": "C1"}) == [("amount", "required")]
    assert contracts.violations("invoice", [1]) == [("", "type")]
    (tmp_path / "rules.json").write_text(json.dumps({"invoice": {"amount": {"min": 0}}}))
    assert Contracts.load(tmp_path / "rules.json").violations("invoice", {"amount": -1}) == [("amount", "min")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "must map names"),
        ("x = 1", "x must map fields"),
        ("[x]\ny = 1", "x.y must be rules"),
        ("[x]\ny = {least = 1}", "unknown rule 'least'"),
        ('[x]\ny = {type = "int"}', "one of string, number"),
        ("[x]\ny = {type = 5}", "type of"),
        ('[x]\ny = {type = [["x"]]}', "one of string, number"),
        ("[x]\ny = {min = 2, max = 1}", "min of"),
        ("[x]\ny = {min = nan}", "min of"),
        ('[x]\ny = {required = "no"}', "required of"),
        ("[x]\ny = {pattern = 5}", "pattern of"),
        ('[x]\ny = {min = "1"}', "min of"),
        ('[x]\ny = {pattern = "("}', "not a regular expression"),
        ("[x]\ny = {one_of = 5}", "must be a list"),
        ("[x", "not valid"),
    ],
)
def test_contracts_that_make_no_sense_are_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "rules.toml").write_text(text)
    done = invoke("pipeline", "check", "--queue", "q", "--contracts", str(tmp_path / "rules.toml"))
    assert done.code == 2
    assert named in done.err
    assert "cannot read" in invoke("pipeline", "check", "--queue", "q", "--contracts", "none.toml").err


def test_waiting_delayed_and_dead_payloads_are_checked(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.jobs(3)
    filled.delayed(2)
    filled.letter("dead", {"n": "x"})
    filled.xadd(filled.keys().stream, "d", b"\xc1", "n", "work")  # not a job
    (tmp_path / "rules_of_app.py").write_text(
        'RULES = {"work": {"n": {"type": "integer", "max": 1}}, "later": {"n": {}}}'
    )
    monkeypatch.chdir(tmp_path)
    checked, found = check_queue(filled.url, "q", Contracts.load("rules_of_app:RULES"))
    assert checked == 7
    assert [(one.stream, one.name, one.field, one.rule, one.jobs) for one in found] == [
        *(("delayed", "later", "", "type", 2), ("jobs", "work", "", "undecodable", 1)),
        *(("jobs", "work", "n", "max", 1), ("dlq", "work", "n", "type", 1)),
    ]
    options = ("pipeline", "check", "--queue", "q", "--contracts", "rules_of_app:RULES", "--url", filled.url)
    LakeVersion().publish(tmp_path / "lake")
    done = invoke(*options, "--lake", str(tmp_path / "lake"))
    assert done.code == 1
    assert "'x'" in done.out
    assert len(query(tmp_path / "lake", "SELECT * FROM gold_violations").to_pylist()) == 4
    page = write_report(tmp_path / "lake", tmp_path / "report.html").read_text()
    assert "Contract violations" in page
    filled.client.delete(filled.keys().stream, filled.keys().delayed, filled.keys().dlq)
    filled.jobs(1)
    done = invoke(*options, "--lake", str(tmp_path / "lake"))
    assert (done.code, done.out) == (0, "1 payload: no violations\n")
    assert read_rows(tmp_path / "lake", "gold/violations") == []


def test_sealed_letters_are_opened_with_the_keys_of_the_environment(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = QueueCodec(SignedCodec({"k": bytes(32)}), "q")
    sealed = decode_value(codec.seal_payload(encode_value({"amount": "5"}), "work"))
    entry_id = filled.letter("a", sealed)
    cluster = cluster_id("retries_exhausted", "ValueError", fingerprint("no"))
    monkeypatch.setenv("TAMPU_CODEC", "signed")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(bytes(32)).decode()}")
    (letter,) = find_letters(filled.url, "q", cluster)
    assert (letter.entry_id, letter.payload) == (entry_id, {"amount": "5"})


def test_sealed_payloads_are_checked_with_the_keys_of_the_environment(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = QueueCodec(SignedCodec({"k": bytes(32)}), "q")
    for job_id, amount in (("good", 5), ("bad", "5")):
        filled.letter(job_id, decode_value(codec.seal_payload(encode_value({"amount": amount}), "work")))
    rules = Contracts.of({"work": {"amount": {"type": "number"}}})
    (found,) = check_queue(filled.url, "q", rules)[1]
    assert (found.rule, found.jobs, found.sample_job_id) == ("undecodable", 2, "good")
    assert found.sample.startswith("signed with key k")
    monkeypatch.setenv("TAMPU_CODEC", "signed")
    monkeypatch.setenv("TAMPU_CODEC_KEYS", f"k:{base64.b64encode(bytes(32)).decode()}")
    (found,) = check_queue(filled.url, "q", rules)[1]
    assert (found.field, found.rule, found.sample_job_id, found.sample) == ("amount", "type", "bad", "'5'")
