// A session of a client of Redis for Node.js: node session.mjs ioredis|node-redis PORT PROTOCOL
// Reads steps as lines of JSON, [kind, what], and prints a reply for each.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const require = createRequire(import.meta.url);
const [library, port, protocol] = [process.argv[2], Number(process.argv[3]), Number(process.argv[4])];

// What both libraries share: `send` a command, a transaction, a pipeline.
async function connect() {
  if (library === "ioredis") {
    const Redis = require("ioredis");
    const client = new Redis({ port, retryStrategy: null, protocol });
    const calls = (steps) => steps.map((step) => ["call", ...step]);
    const replies = (pairs) => pairs?.map(([error, reply]) => error ?? reply) ?? null;
    return {
      send: (...args) => client.call(...args),
      pipeline: async (steps) => replies(await client.pipeline(calls(steps)).exec()),
      transaction: async (steps) => replies(await client.multi(calls(steps)).exec()),
      close: () => client.quit(),
    };
  }
  const { createClient } = require("@redis/client");
  const client = createClient({ RESP: protocol, socket: { port, host: "127.0.0.1", reconnectStrategy: false } });
  await client.connect();
  const words = (step) => step.map(String);
  return {
    send: (...args) => client.sendCommand(words(args)),
    pipeline: (steps) => Promise.all(steps.map((step) => client.sendCommand(words(step)).catch((error) => error))),
    transaction: (steps) => {
      const multi = client.multi();
      for (const step of steps) multi.addCommand(words(step));
      return multi.exec().catch((error) => (error.constructor.name === "WatchError" ? null : Promise.reject(error)));
    },
    close: () => client.close(),
  };
}

// Replies as plain data: maps of RESP3 are objects, errors are their messages.
function plain(reply) {
  if (reply instanceof Error) return { error: reply.message };
  if (reply instanceof Map) return Object.fromEntries([...reply].map(([key, value]) => [key, plain(value)]));
  if (Buffer.isBuffer(reply)) return reply.toString();
  if (Array.isArray(reply)) return reply.map(plain);
  if (reply !== null && typeof reply === "object") {
    return Object.fromEntries(Object.entries(reply).map(([key, value]) => [key, plain(value)]));
  }
  return reply;
}

const client = await connect();
const other = await connect();
for await (const line of createInterface({ input: process.stdin })) {
  const [kind, steps] = JSON.parse(line);
  const subject = kind === "other" ? other : client;
  const act = kind === "pipeline" || kind === "transaction" ? subject[kind](steps) : subject.send(...steps);
  console.log(JSON.stringify(plain(await act.catch((error) => error))));
}
await client.close();
await other.close();
