// HTTP, HTTP/2 and plain servers; alone, or in workers that the master hands connections or its listeners to.
// Arguments: "single", "round-robin" or "shared"; a file to serve. Prints the ports.
"use strict";
const cluster = require("cluster");
const crypto = require("crypto");
const fs = require("fs");
const http = require("http");
const http2 = require("http2");
const net = require("net");
const { spawn } = require("child_process");

const [mode, file] = process.argv.slice(2);
cluster.schedulingPolicy = mode === "shared" ? cluster.SCHED_NONE : cluster.SCHED_RR;

function answer(request, response) {
  if (request.url === "/hash") {
    const hash = crypto.createHash("sha256");
    request.on("data", (data) => hash.update(data)).on("end", () => response.end(hash.digest("hex")));
  } else if (request.url === "/file") {
    fs.createReadStream(file).pipe(response);
  } else if (request.url === "/child") {
    spawn("/bin/cat", [file]).stdout.pipe(response);
  } else {
    response.end(Buffer.alloc(Number(request.url.slice(1)), "x"));
  }
}

function serve() {
  const one = http.createServer(answer);
  one.keepAliveTimeout = 2000;
  one.on("upgrade", (request, socket) => {
    socket.write("HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n");
    socket.pipe(socket);
  });
  const two = http2.createServer((request, response) => {
    let length = 0;
    request.on("data", (data) => (length += data.length)).on("end", () => response.end(Buffer.alloc(length, "y")));
  });
  const plain = net.createServer({ allowHalfOpen: true }, (socket) => {
    const all = [];
    socket.on("data", (data) => all.push(data)).on("end", () => socket.end(Buffer.concat(all)));
  });
  const listening = [one, two, plain].map(
    (server) => new Promise((ready) => server.listen(0, "127.0.0.1", () => ready(server.address().port))),
  );
  Promise.all(listening).then((ports) => console.log("ports", ...ports));
  process.on("SIGTERM", () => process.exit(0));
}

if (mode !== "single" && cluster.isPrimary) {
  cluster.fork().on("listening", () => Object.keys(cluster.workers).length < 2 && cluster.fork());
  process.on("SIGTERM", () => {
    Object.values(cluster.workers).forEach((worker) => worker.kill());
    cluster.on("exit", () => Object.keys(cluster.workers).length || process.exit(0));
  });
} else {
  serve();
}
