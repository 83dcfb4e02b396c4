// Drives the real `rsmq` from npm for the tests: one JSON object per line in, one per line out.
//
//   in   {"id": 1, "method": "createQueue", "options": {"qname": "q"}}       any method of rsmq
//        {"id": 2, "subscribe": "rsmq:rt:q"}                                 hear a channel
//        {"id": 3, "repeat": 1000, "steps": [["sendMessage", {...}], ...]}   the same calls over and over, timed
//   out  {"id": 1, "result": 1}   {"id": 1, "error": {"name": "queueExists", "message": "Queue exists"}}
//        {"event": "message", "channel": "rsmq:rt:q", "message": "1"}
//
// Arguments: the folder with node_modules, port, ns, "realtime" or "". It ends with its standard input.

"use strict";
const path = require("path");
const readline = require("readline");

const [folder, port, ns, realtime] = process.argv.slice(2);
const modules = path.join(folder, "node_modules");
const RedisSMQ = require(path.join(modules, "rsmq"));
const redis = require(path.join(modules, "redis"));

const rsmq = new RedisSMQ({ host: "127.0.0.1", port: Number(port), ns, realtime: realtime === "realtime" });
let subscriber = null;

function say(value) {
  process.stdout.write(JSON.stringify(value) + "\n");
}

function subscribe(channel) {
  return new Promise((resolve, reject) => {
    if (!subscriber) {
      subscriber = redis.createClient({ host: "127.0.0.1", port: Number(port) });
      subscriber.on("message", (heard, message) => say({ event: "message", channel: heard, message }));
      subscriber.on("error", reject);
    }
    subscriber.subscribe(channel, (error) => (error ? reject(error) : resolve(1)));
  });
}

// "LAST" in an option stands for the id that the step before gave.
async function repeat(times, steps) {
  const began = process.hrtime.bigint();
  for (let time = 0; time < times; time++) {
    let last = null;
    for (const [method, options] of steps) {
      const given = { ...options }; // rsmq writes its defaults into what it is given
      if (given.id === "LAST") given.id = last;
      const result = await rsmq[method + "Async"](given);
      last = result && result.id ? result.id : result;
    }
  }
  return Number(process.hrtime.bigint() - began) / 1e9;
}

function perform(request) {
  if (request.subscribe) return subscribe(request.subscribe);
  if (request.repeat) return repeat(request.repeat, request.steps);
  const method = rsmq[request.method + "Async"];
  return request.method === "listQueues" ? method() : method(request.options);
}

readline
  .createInterface({ input: process.stdin })
  .on("line", async (line) => {
    const request = JSON.parse(line);
    try {
      say({ id: request.id, result: await perform(request) });
    } catch (error) {
      say({ id: request.id, error: { name: error.name, message: error.message } });
    }
  })
  .on("close", () => process.exit(0));
say({ event: "ready" });
