// Talks to node_server.js, whose ports are the arguments, and prints what came.
"use strict";
const crypto = require("crypto");
const http = require("http");
const http2 = require("http2");
const net = require("net");

const [one, two, plain] = process.argv.slice(2).map(Number);
const host = "127.0.0.1";
const agent = new http.Agent({ keepAlive: true, maxSockets: 6 });
const digest = (data) => crypto.createHash("sha256").update(data).digest("hex");
const count = (length) => [...Array(length).keys()];

function all(stream) {
  return new Promise((done, failed) => {
    const parts = [];
    stream.on("data", (data) => parts.push(data)).on("end", () => done(Buffer.concat(parts))).on("error", failed);
  });
}

function ask(path, body, headers = {}) {
  return new Promise((done, failed) => {
    const request = http.request({ host, port: one, path, agent, method: body ? "POST" : "GET", headers });
    request.on("response", (response) => all(response).then(done, failed)).on("error", failed);
    if (headers.expect) request.on("continue", () => request.end(body));
    else request.end(body);
  });
}

async function requests() {
  const jobs = count(60).flatMap((n) => {
    const body = Buffer.alloc(1 + n * 30011, String(n));
    const headers = n % 7 ? {} : { expect: "100-continue", "content-length": body.length };
    const posted = ask("/hash", body, headers).then((hash) => `hash ${n} ${hash == digest(body)}`);
    const got = ask(`/${n * 10007}`).then((data) => `get ${n} ${digest(data)}`);
    if (n % 6) return [posted, got];
    return [posted, got, ...["/file", "/child"].map((path) => ask(path).then((data) => path + digest(data)))];
  });
  return Promise.all(jobs);
}

/** A connection that stops being HTTP, as a WebSocket does. */
function upgraded() {
  const headers = { connection: "Upgrade", upgrade: "echo" };
  return new Promise((done, failed) => {
    http.request({ host, port: one, headers }).on("error", failed).end().on("upgrade", (response, socket) => {
      const hash = crypto.createHash("sha256");
      let left = 5000000;
      socket.on("data", (data) => {
        hash.update(data);
        left -= data.length;
        if (!left) {
          socket.end();
          done(`upgraded ${hash.digest("hex")}`);
        }
      });
      let sent = 0;
      (function more() {
        while (sent < 100) if (!socket.write(Buffer.alloc(50000, sent++))) return socket.once("drain", more);
      })();
    });
  });
}

async function streams() {
  const session = http2.connect(`http://${host}:${two}`);
  const answers = count(30).map((n) => {
    const stream = session.request({ ":method": "POST", ":path": "/" });
    stream.end(Buffer.alloc(n * 20011, "z"));
    return all(stream).then((data) => `stream ${n} ${digest(data)}`);
  });
  const lines = await Promise.all(answers);
  await new Promise((closed) => session.close(closed));
  return lines;
}

async function halfClosed() {
  const socket = net.connect({ host, port: plain, allowHalfOpen: true });
  count(50).forEach((n) => socket.write(Buffer.alloc(9999, n)));
  socket.end();
  return `half-closed ${digest(await all(socket))}`;
}

async function fetched() {
  const texts = count(10).map(async (n) => (await (await fetch(`http://${host}:${one}/${n * 50021}`)).text()).length);
  return `fetched ${(await Promise.all(texts)).join()}`;
}

(async () => {
  for (let round = 0; round < 2; round++) {
    const lines = [await requests(), await upgraded(), await streams(), await halfClosed(), await fetched()];
    console.log(lines.flat().join("\n"));
    // An idle connection is kept for two seconds: who asked later might find it closed at that moment.
    const idle = Object.values(agent.freeSockets).flat();
    await Promise.all(idle.map((socket) => new Promise((closed) => socket.once("close", closed))));
  }
  process.exit(0);
})();
