"""Dead letters as a table: group them by error, repair their payloads with DataFrame code, and replay them.

    python examples/spark/repair_dead_letters.py             # on an embedded server, with generated dead letters

Prints the clusters, repairs the largest one, and shows that its jobs are back in the queue.
"""

from __future__ import annotations

import tempfile

import redis

from tampu.embedded import EmbeddedServer
from tampu.spark import spark_session
from tampu.spark.lake.gold import clusters_of, with_fingerprints
from tampu.wire import QueueKeys, encode_dlq_fields
from tampu.wire.dlq import DlqEntry
from tampu.wire.envelope import encode_envelope
from tampu.wire.payload import encode_slot

QUEUE = "billing"


def make_letters(client: redis.Redis) -> None:
    """Write 200 jobs that failed because the amount contains a currency, and 5 with an unknown customer."""
    for number in range(205):
        is_amount = number < 200
        payload = {"customer": f"c{number}", "amount": f"{number}.50 EUR" if is_amount else 5}
        letter = DlqEntry(
            dlq_id="",
            source_id=f"{number + 1}-0",
            reason="retries_exhausted" if is_amount else "unrecoverable",
            payload=encode_envelope(f"job-{number}", encode_slot(payload), 1_790_000_000_000, 3),
            name="invoice",
            error_type="ValueError" if is_amount else "LookupError",
            error=f"could not convert string to float: '{number}.50 EUR'" if is_amount else f"no customer {number}",
            attempts=3,
            failed_at_ms=1_790_000_100_000 + number,
        )
        client.execute_command("XADD", QueueKeys(QUEUE).dlq, "*", *encode_dlq_fields(letter))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(folder) as server:
        client = redis.Redis.from_url(server.url, protocol=2)
        make_letters(client)
        spark = spark_session("repair", master="local[2,4]")
        letters = spark.read.format("tampu").options(url=server.url, queue=QUEUE, stream="dlq", payload="json").load()
        clusters = clusters_of(letters).orderBy("letters", ascending=False)
        clusters.select("cluster", "reason", "error_type", "fingerprint", "letters").show(truncate=False)

        largest = clusters.first()
        assert largest is not None
        broken = with_fingerprints(letters).where(f"cluster = '{largest['cluster']}'")
        repaired = broken.selectExpr(
            "queue",
            "entry_id",
            """to_json(struct(
                 variant_get(parse_json(payload), '$.customer', 'string') AS customer,
                 cast(replace(variant_get(parse_json(payload), '$.amount', 'string'), ' EUR', '') AS double) AS amount
               )) AS payload""",
        )
        repaired.show(3, truncate=False)
        repaired.write.format("tampu").options(url=server.url, stream="dlq").mode("append").save()

        keys = QueueKeys(QUEUE)
        print(f"{client.xlen(keys.stream)} jobs are back in the queue, {client.xlen(keys.dlq)} letters are left,")
        print(f"{client.hlen(keys.replays)} replays are counted")
        spark.stop()


if __name__ == "__main__":
    main()
