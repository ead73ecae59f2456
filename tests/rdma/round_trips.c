/* Round trips on TCP connections, for whatever library is preloaded.
 *
 *     round_trips serve ADDRESS PORT BYTES ROUNDS [CONNECTIONS]
 *     round_trips ask ADDRESS PORT BYTES ROUNDS [CONNECTIONS]      prints round trips per second
 *
 * Without CONNECTIONS on one, in calls that block; with them on so many, all busy at once, each side in one event loop (at
 * most 1,000). A tenth as many come first, unmeasured. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1000 };

static char buffer[1 << 20];
static int serves;
static size_t bytes;
/* Of each connection: of the present round. */
static size_t got[MOST];
static long rounds_done[MOST];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void get(int fd) {
    for (size_t done = 0; done < bytes;) {
        ssize_t count = recv(fd, buffer + done, bytes - done, 0);
        if (count <= 0) fail("recv");
        done += count;
    }
}

static void put(int fd) {
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

static void ask(int fd, long round) {
    buffer[0] = buffer[bytes - 1] = round;
    put(fd);
}

static void check(long round) {
    if (buffer[0] != (char)round || buffer[bytes - 1] != (char)round) {
        fprintf(stderr, "another answer than was sent\n");
        exit(1);
    }
}

static void one_round(int fd, long round) {
    if (serves) {
        get(fd);
        put(fd);
    } else {
        ask(fd, round);
        get(fd);
        check(round);
    }
}

/* So many rounds on each of these, at once. Of a message that comes in pieces only the last byte is kept, and checked. */
static void loop(int set, const int *fds, int connections, long rounds) {
    struct epoll_event events[64];
    long left = rounds * connections;
    for (int index = 0; index < connections; index++) {
        got[index] = 0;
        rounds_done[index] = 0;
        if (!serves) ask(fds[index], 0);
    }
    while (left > 0) {
        int count = epoll_wait(set, events, 64, -1);
        if (count < 0) fail("epoll_wait");
        for (int place = 0; place < count; place++) {
            int index = events[place].data.u32;
            /* The end of one that is done, while others are not. */
            if (rounds_done[index] == rounds) continue;
            ssize_t more = recv(fds[index], buffer, bytes - got[index], 0);
            if (more <= 0) fail("recv");
            got[index] += more;
            if (got[index] < bytes) continue;
            got[index] = 0;
            left--;
            rounds_done[index]++;
            buffer[0] = buffer[bytes - 1] = buffer[more - 1];
            if (serves) {
                put(fds[index]);
                continue;
            }
            check(rounds_done[index] - 1);
            if (rounds_done[index] < rounds) ask(fds[index], rounds_done[index]);
        }
    }
}

int main(int argc, char **argv) {
    if (argc < 6 || argc > 7) return 2;
    int one = 1, connections = argc == 7 ? atoi(argv[6]) : 1, fds[MOST];
    serves = strcmp(argv[1], "serve") == 0;
    bytes = atol(argv[4]);
    long rounds = atol(argv[5]);
    if (bytes == 0 || bytes > sizeof buffer || connections < 1 || connections > MOST) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[3]))};
    if (inet_pton(AF_INET, argv[2], &address.sin_addr) != 1) return 2;
    int listener = -1, set = epoll_create1(0);
    if (set < 0) fail("epoll_create1");
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM, 0);
        if (listener < 0) fail("socket");
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0) fail("bind");
        if (listen(listener, connections) != 0) fail("listen");
    }
    for (int index = 0; index < connections; index++) {
        int fd = serves ? accept(listener, NULL, NULL) : socket(AF_INET, SOCK_STREAM, 0);
        if (fd < 0) fail("accept or socket");
        if (!serves && connect(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("connect");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = index};
        if (argc == 7 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
        fds[index] = fd;
    }
    double start = 0;
    if (argc == 7) {
        loop(set, fds, connections, rounds / 10 + 1);
        start = now();
        loop(set, fds, connections, rounds);
    } else {
        for (long round = -rounds / 10; round < rounds; round++) {
            if (round == 0) start = now();
            one_round(fds[0], round);
        }
    }
    if (!serves) printf("%.1f\n", rounds * connections / (now() - start));
    for (int index = 0; index < connections; index++) close(fds[index]);
    return 0;
}
