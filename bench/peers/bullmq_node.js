// BullMQ at home: Node. `node bullmq_node.js FOLDER_WITH_NODE_MODULES URL SERVER_PID`; asked as the Python programs are.
"use strict";
const fs = require("fs");
const path = require("path");
const readline = require("readline");

const [folder, url, serverPid] = process.argv.slice(2);
const { createRequire } = require("module");
const load = createRequire(path.join(folder, "package.json"));
const { Queue, QueueEvents, Worker } = load("bullmq");
const IORedis = load("ioredis");

const PAYLOAD = { to: "ada@example.com", subject: "Welcome aboard", body: "x".repeat(60) };
const REMOVED = { removeOnComplete: true, removeOnFail: true };
const connect = () => new IORedis(url, { maxRetriesPerRequest: null });

function cpuNs(pid) {
  let total = 0;
  for (const task of fs.readdirSync(`/proc/${pid}/task`)) {
    total += Number(fs.readFileSync(`/proc/${pid}/task/${task}/schedstat`, "utf8").split(" ")[0]);
  }
  return total;
}

function stopwatch() {
  const server = cpuNs(serverPid);
  const client = process.cpuUsage();
  const began = process.hrtime.bigint();
  return (jobs) => {
    const seconds = Number(process.hrtime.bigint() - began) / 1e9;
    const used = process.cpuUsage(client);
    return {
      rate: jobs / seconds,
      client_us: (used.user + used.system) / jobs,
      server_us: (cpuNs(serverPid) - server) / jobs / 1e3,
    };
  };
}

async function withQueue(work) {
  const connection = connect();
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  try {
    return await work(queue);
  } finally {
    await queue.close();
    connection.disconnect();
  }
}

async function drained({ total, concurrency = 100, failsOnce = false, options = {} }) {
  const size = Math.min(total, 500);
  const count = Math.floor(total / size) * size;
  const jobs = Array(size).fill({ name: "nothing", data: PAYLOAD, opts: { ...REMOVED, ...options } });
  await withQueue(async (queue) => {
    for (let added = 0; added < count; added += size) await queue.addBulk(jobs);
  });
  const connection = connect();
  let done = 0;
  let finish;
  const finished = new Promise((resolve) => (finish = resolve));
  const stop = stopwatch();
  const worker = new Worker(
    "bench",
    async (job) => {
      if (failsOnce && job.attemptsMade === 0) throw new Error("first run");
      if (++done === count) finish();
    },
    { connection, concurrency },
  );
  worker.on("error", () => {});
  await finished;
  const figures = stop(count);
  await worker.close(true);
  connection.disconnect();
  return figures;
}

const adds = (options) => async ({ total }) =>
  withQueue(async (queue) => {
    await queue.add("nothing", PAYLOAD, options);
    const stop = stopwatch();
    for (let i = 0; i < total; i++) await queue.add("nothing", PAYLOAD, options);
    return stop(total);
  });

async function roundTrips({ total, callers = 1 }) {
  const [workerConnection, eventConnection] = [connect(), connect()];
  const worker = new Worker("bench", async () => ({ sent: true }), { connection: workerConnection, concurrency: 100 });
  worker.on("error", () => {});
  const events = new QueueEvents("bench", { connection: eventConnection });
  await Promise.all([worker.waitUntilReady(), events.waitUntilReady()]);
  const figures = await withQueue(async (queue) => {
    const once = async () => (await queue.add("send", PAYLOAD)).waitUntilFinished(events, 30_000);
    await once();
    const took = [];
    const caller = async () => {
      for (let i = 0; i < Math.floor(total / callers); i++) {
        const began = process.hrtime.bigint();
        await once();
        took.push(Number(process.hrtime.bigint() - began) / 1e6);
      }
    };
    const stop = stopwatch();
    await Promise.all(Array.from({ length: callers }, caller));
    const measured = stop(took.length);
    took.sort((a, b) => a - b);
    for (const p of [50, 90, 99, 99.9]) {
      measured[`p${p}_ms`] = took[Math.min(Math.floor((took.length * p) / 100), took.length - 1)];
    }
    return { ...measured, max_ms: took[took.length - 1] };
  });
  await worker.close(true);
  await events.close();
  for (const connection of [workerConnection, eventConnection]) connection.disconnect();
  return figures;
}

const scenarios = {
  "round-trip": roundTrips,
  "queue-add": adds(REMOVED),
  "queue-add-bulk": async ({ total, size }) =>
    withQueue(async (queue) => {
      const jobs = Array(size).fill({ name: "nothing", data: PAYLOAD, opts: REMOVED });
      await queue.addBulk(jobs);
      const stop = stopwatch();
      for (let i = 0; i < total / size; i++) await queue.addBulk(jobs);
      return stop(total);
    }),
  "queue-add-concurrent": async ({ total }) =>
    withQueue(async (queue) => {
      await queue.add("nothing", PAYLOAD, REMOVED);
      const stop = stopwatch();
      await Promise.all(Array.from({ length: total }, () => queue.add("nothing", PAYLOAD, REMOVED)));
      return stop(total);
    }),
  "queue-add-delayed": adds({ ...REMOVED, delay: 3_600_000 }),
  worker: drained,
  "worker-delayed": (request) => drained({ ...request, options: { delay: 1 } }),
  "worker-retry": (request) =>
    drained({ ...request, failsOnce: true, options: { attempts: 3, backoff: { type: "fixed", delay: 1 } } }),
};

const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");
answer({
  name: "bullmq-node",
  versions: { node: process.version, ioredis: load("ioredis/package.json").version },
  settings: {
    adding: "add, addBulk; removeOnComplete, removeOnFail; ioredis (which sends what is added in one turn together)",
    working: "concurrency=100, removeOnComplete, one process; `round-trip`: results kept, waitUntilFinished",
  },
  scenarios: Object.keys(scenarios),
});
(async () => {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { scenario, ...request } = JSON.parse(line);
    try {
      answer(await scenarios[scenario](request));
    } catch (error) {
      answer({ error: `${error.name}: ${error.message}` });
    }
  }
  process.exit(0);
})();
