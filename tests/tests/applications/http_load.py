"""Threads that ask a web server for files in every way it knows, put files, and compare, until SIGTERM.

Arguments: the port; the folder with the files, named by their sizes; the number of threads; the first parts of the paths.
A server that ends between two requests closes idle connections: then a thread begins anew, as every client does.
"""
import http.client
import pathlib
import random
import signal
import sys
import threading

port, folder, threads, places = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")
files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
wrong, lock, done = [], threading.Lock(), 0


def ask(connection, place, name, who):
    if place == "put":
        path = f"/put/{port}-{who}"
        connection.request("PUT", path, files[name])
        response = connection.getresponse()
        response.read()
        right = response.status in (201, 204) and (folder / path[1:]).read_bytes() == files[name]
    else:
        connection.request("GET", f"/{place}/{name}" if place else f"/{name}")
        response = connection.getresponse()
        right = response.read() == files[name] and response.status == 200
    return right, response


def work(who):
    global done
    choice, connection = random.Random(who), None
    while not stop.is_set() and not wrong:
        place, name = choice.choice(places), choice.choice(sorted(files))
        connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            right, response = ask(connection, place, name, who)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()
            connection = None
            continue
        except http.client.IncompleteRead as error:
            if place != "proxy":
                wrong.append(f"{place}/{name}: {error!r}")
                return
            # So nginx does, over TCP as well, when the worker that it asked ends.
            connection.close()
            connection = None
            continue
        except Exception as error:
            wrong.append(f"{place}/{name}: {error!r}")
            return
        if not right:
            wrong.append(f"{place}/{name}: {response.status}")
            return
        if response.getheader("connection") == "close" or choice.random() < 0.02:
            connection.close()
            connection = None
        with lock:
            done += 1
            if done % 50 == 0:
                print(done, flush=True)


workers = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
for worker in workers:
    worker.start()
for worker in workers:
    # The handler of a signal that another thread has got runs only when this one wakes up.
    while worker.is_alive():
        worker.join(0.1)
print("wrong:", *wrong) if wrong else print("all right")
sys.exit(bool(wrong))
