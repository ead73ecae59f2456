/* Round trips on one TCP connection, for whatever library is preloaded.
 *
 *     round_trips serve ADDRESS PORT BYTES ROUNDS
 *     round_trips ask ADDRESS PORT BYTES ROUNDS      prints round trips per second
 *
 * A tenth as many come first, unmeasured. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static char buffer[1 << 20];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void get(int fd, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t count = recv(fd, buffer + done, bytes - done, 0);
        if (count <= 0) fail("recv");
        done += count;
    }
}

static void put(int fd, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t count = send(fd, buffer + done, bytes - done, 0);
        if (count <= 0) fail("send");
        done += count;
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    int serves = strcmp(argv[1], "serve") == 0, one = 1;
    size_t bytes = atol(argv[4]);
    long rounds = atol(argv[5]);
    if (bytes == 0 || bytes > sizeof buffer) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[3]))};
    if (inet_pton(AF_INET, argv[2], &address.sin_addr) != 1) return 2;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0) fail("socket");
    if (serves) {
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("bind");
        if (listen(fd, 1) != 0) fail("listen");
        fd = accept(fd, NULL, NULL);
        if (fd < 0) fail("accept");
    } else if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        fail("connect");
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    double start = 0;
    for (long round = -rounds / 10; round < rounds; round++) {
        if (round == 0) start = now();
        if (serves) {
            get(fd, bytes);
            put(fd, bytes);
        } else {
            buffer[0] = buffer[bytes - 1] = round;
            put(fd, bytes);
            get(fd, bytes);
            if (buffer[0] != (char)round || buffer[bytes - 1] != (char)round) {
                fprintf(stderr, "another answer than was sent\n");
                return 1;
            }
        }
    }
    if (!serves) printf("%.1f\n", rounds / (now() - start));
    close(fd);
    return 0;
}
