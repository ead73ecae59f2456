"""Forty requests, over one connection or over forty."""

import hashlib
import http.client
import sys
import urllib.request

port, way = int(sys.argv[1]), sys.argv[2]
digest = hashlib.sha256()
if way == "keep":
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for turn in range(20):
        conn.request("GET", f"/{turn * turn * 5000}")
        digest.update(conn.getresponse().read())
        conn.request("POST", "/", body=bytes([turn]) * (turn * 10_000))
        digest.update(conn.getresponse().read())
    conn.close()
else:
    for turn in range(20):
        url = f"http://127.0.0.1:{port}/"
        with urllib.request.urlopen(f"{url}{turn * 5000}", timeout=60) as answer:
            digest.update(answer.read())
        with urllib.request.urlopen(url, data=bytes([turn]) * (turn * 1000), timeout=60) as answer:
            digest.update(answer.read())
print(digest.hexdigest())
