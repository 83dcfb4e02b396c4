// rsmq from npm: one message after the other. `node rsmq.js FOLDER_WITH_NODE_MODULES URL SERVER_PID`.
"use strict";
const fs = require("fs");
const path = require("path");
const readline = require("readline");
const { createRequire } = require("module");

const [folder, url, serverPid] = process.argv.slice(2);
const RSMQ = createRequire(path.join(folder, "package.json"))("rsmq");
const where = new URL(url);
const rsmq = new RSMQ({ host: where.hostname, port: Number(where.port), ns: "rsmq" });
const MESSAGE = "x".repeat(100);
const qname = "bench";

function cpuNs(pid) {
  let total = 0;
  for (const task of fs.readdirSync(`/proc/${pid}/task`)) {
    total += Number(fs.readFileSync(`/proc/${pid}/task/${task}/schedstat`, "utf8").split(" ")[0]);
  }
  return total;
}

async function timed(total, step) {
  const server = cpuNs(serverPid);
  const client = process.cpuUsage();
  const began = process.hrtime.bigint();
  for (let i = 0; i < total; i++) await step();
  const seconds = Number(process.hrtime.bigint() - began) / 1e9;
  const used = process.cpuUsage(client);
  return {
    rate: total / seconds,
    client_us: (used.user + used.system) / total,
    server_us: (cpuNs(serverPid) - server) / total / 1e3,
  };
}

const send = () => rsmq.sendMessageAsync({ qname, message: MESSAGE });
const make = () => rsmq.createQueueAsync({ qname }).catch(() => {});
const scenarios = {
  "rsmq-send": async ({ total }) => {
    await make();
    await send();
    return timed(total, send);
  },
  "rsmq-receive-delete": async ({ total }) => {
    await make();
    for (let i = 0; i < total; i++) await send();
    return timed(total, async () => {
      const message = await rsmq.receiveMessageAsync({ qname });
      await rsmq.deleteMessageAsync({ qname, id: message.id });
    });
  },
};

const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");
answer({
  name: "rsmq",
  versions: { node: process.version },
  settings: { adding: "sendMessageAsync, one after the other", working: "receiveMessageAsync, then deleteMessageAsync" },
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
