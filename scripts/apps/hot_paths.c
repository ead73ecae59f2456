/* The calls that programs make most, and the number of instructions that each takes outside of the kernel: see
 * instructions.py.
 *
 *   hot_paths CONNECTIONS [LIBRARY]     CONNECTIONS: in the largest epoll set
 *
 * Runs itself, with LIBRARY preloaded, and goes through what it counts instruction by instruction (ptrace(2),
 * PTRACE_SINGLESTEP). One thread has both ends of every connection in use, so no call that is counted waits, and nobody spins.
 * Of what does more now and then, by the clock, the least counts. Prints a line "NAME INSTRUCTIONS" for each call. (valgrind has no room for 10,000 connections: it
 * gives a program 64 GiB of addresses.) */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* A step takes some microseconds, up to 20 in a virtual machine. CALLS is a multiple of 8: of as many waits in a row one asks
 * the kernel, too. */
enum { CALLS = 8, SMALL = 64, READY = 10, WARM_UP = 64, MANY = 640, LIVES = 4, LIVES_BEFORE = 8 };

/* What the two processes share. */
static volatile struct {
    /* The traced one is behind what is counted. */
    int over;
    /* Of what was counted since the last name: calls, and instructions of all. */
    long calls, instructions;
} *shared;

static char buffer[SMALL];

static void fail(const char *what) {
    fprintf(stderr, "hot_paths: %s: %s\n", what, strerror(errno));
    exit(1);
}

static long check(const char *what, long result) {
    if (result < 0)
        fail(what);
    return result;
}

static void expect(const char *what, long result, long wanted) {
    if (result != wanted) {
        fprintf(stderr, "hot_paths: %s gave %ld, not %ld\n", what, result, wanted);
        exit(1);
    }
}

/* Counts what is in `call`, and itself: EMPTY says how much that is. */
#define COUNTED(call)              \
    ({                             \
        __asm__ volatile("int3");  \
        __auto_type result = call; \
        shared->over = 1;          \
        result;                    \
    })

static long empty, least = -1;

/* What was counted is one of several that should be the same. */
static void again(void) {
    long mean = shared->instructions / shared->calls - empty;
    if (least < 0 || mean < least)
        least = mean;
    shared->calls = shared->instructions = 0;
}

static void tell(const char *name) {
    if (shared->calls)
        again();
    printf("%s %ld\n", name, least);
    least = -1;
}

static struct sockaddr_in address = {.sin_family = AF_INET};

static int listen_somewhere(void) {
    int listener = check("socket", socket(AF_INET, SOCK_STREAM, 0));
    socklen_t length = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check("bind", bind(listener, (struct sockaddr *)&address, length));
    check("listen", listen(listener, 128));
    check("getsockname", getsockname(listener, (struct sockaddr *)&address, &length));
    return listener;
}

struct pair {
    int client, server;
};

static struct pair connected(int listener) {
    struct pair pair;
    pair.client = check("socket", socket(AF_INET, SOCK_STREAM, 0));
    check("connect", connect(pair.client, (struct sockaddr *)&address, sizeof address));
    pair.server = check("accept", accept(listener, NULL, NULL));
    return pair;
}

static void round_trips(struct pair pair, int count) {
    for (int i = 0; i < count; i++) {
        expect("send", send(pair.client, buffer, SMALL, 0), SMALL);
        expect("recv", recv(pair.server, buffer, SMALL, 0), SMALL);
        expect("send", send(pair.server, buffer, SMALL, 0), SMALL);
        expect("recv", recv(pair.client, buffer, SMALL, 0), SMALL);
    }
}

static void close_pair(struct pair pair) {
    check("close", close(pair.client));
    check("close", close(pair.server));
}

/* An upgraded connection, if both ends may be. */
static struct pair upgraded(int listener) {
    struct pair pair = connected(listener);
    round_trips(pair, WARM_UP);
    return pair;
}

static void messages(struct pair pair) {
    for (int i = 0; i < CALLS; i++) {
        expect("send", COUNTED(send(pair.client, buffer, SMALL, 0)), SMALL);
        expect("recv", recv(pair.server, buffer, SMALL, 0), SMALL);
    }
    tell("send, 64 B");
    for (int i = 0; i < CALLS; i++) {
        expect("send", send(pair.client, buffer, SMALL, 0), SMALL);
        expect("recv", COUNTED(recv(pair.server, buffer, SMALL, 0)), SMALL);
    }
    tell("recv, 64 B");
}

static void waits(struct pair pair) {
    for (int i = 0; i < CALLS; i++)
        expect("recv", COUNTED(recv(pair.server, buffer, SMALL, MSG_DONTWAIT)), -1);
    tell("recv of nothing");
    struct pollfd one = {.fd = pair.server, .events = POLLIN};
    for (int i = 0; i < CALLS; i++) {
        expect("poll", COUNTED(poll(&one, 1, 0)), 0);
        again();
    }
    tell("poll of nothing");
    expect("send", send(pair.client, buffer, SMALL, 0), SMALL);
    for (int i = 0; i < CALLS; i++)
        expect("poll", COUNTED(poll(&one, 1, -1)), 1);
    tell("poll");
    expect("recv", recv(pair.server, buffer, SMALL, 0), SMALL);
}

/* What event loops do that ask for room only while they have something to write, and those that register anew for each wait. */
static void registrations(struct pair pair) {
    struct epoll_event in = {.events = EPOLLIN}, both = {.events = EPOLLIN | EPOLLOUT}, event;
    int set = check("epoll_create1", epoll_create1(EPOLL_CLOEXEC));
    check("epoll_ctl", epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &in));
    expect("epoll_wait", epoll_wait(set, &event, 1, 0), 0);
    for (int i = 0; i < CALLS; i++)
        expect("epoll_ctl", COUNTED(epoll_ctl(set, EPOLL_CTL_MOD, pair.server, i % 2 ? &in : &both)), 0);
    tell("epoll_ctl, EPOLL_CTL_MOD");
    for (int i = 0; i < CALLS; i++) {
        expect("epoll_ctl", COUNTED(epoll_ctl(set, EPOLL_CTL_DEL, pair.server, NULL)), 0);
        expect("epoll_ctl", COUNTED(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &in)), 0);
    }
    tell("epoll_ctl, EPOLL_CTL_DEL or _ADD");
    check("close", close(set));
}

/* A message on each of the first connections. What goes over TCP may arrive later than the call returns. */
static void burst(struct pair *pairs) {
    for (int n = 0; n < READY; n++)
        expect("send", send(pairs[n].client, buffer, SMALL, 0), SMALL);
    for (int n = 0; n < READY; n++)
        expect("recv", recv(pairs[n].server, buffer, SMALL, MSG_PEEK), SMALL);
}

static void take(struct pair *pairs, struct epoll_event *events) {
    for (int n = 0; n < READY; n++)
        expect("recv", recv(pairs[events[n].data.u32].server, buffer, SMALL, 0), SMALL);
}

/* Waits for messages on READY of `count` connections, which are all in one set. */
static void epoll(struct pair *pairs, int count) {
    struct epoll_event events[READY + 1];
    char name[64];
    int set = check("epoll_create1", epoll_create1(EPOLL_CLOEXEC));
    for (int i = 0; i < count; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        check("epoll_ctl", epoll_ctl(set, EPOLL_CTL_ADD, pairs[i].server, &event));
    }
    for (int i = 0; i < MANY; i++) {
        burst(pairs);
        expect("epoll_wait", epoll_wait(set, events, READY + 1, -1), READY);
        take(pairs, events);
    }
    for (int i = 0; i < CALLS; i++) {
        burst(pairs);
        expect("epoll_wait", COUNTED(epoll_wait(set, events, READY + 1, -1)), READY);
        take(pairs, events);
    }
    snprintf(name, sizeof name, "epoll_wait, %d of %d ready", READY, count);
    tell(name);
    for (int i = 0; i < CALLS; i++)
        expect("epoll_wait", COUNTED(epoll_wait(set, events, READY, 0)), 0);
    snprintf(name, sizeof name, "epoll_wait, none of %d ready", count);
    tell(name);
    check("close", close(set));
}

static int live(int listener, int count) {
    struct pair pair = connected(listener);
    round_trips(pair, count);
    close_pair(pair);
    return 0;
}

/* A connection from its beginning to its end, both sides, with `count` round trips. */
static void lives(int listener, int count, const char *name) {
    for (int i = 0; i < LIVES_BEFORE; i++)
        live(listener, count);
    for (int i = 0; i < LIVES; i++) {
        COUNTED(live(listener, count));
        again();
    }
    tell(name);
}

/* Calls on what the library has nothing to do with; each made once before, so that its name has been looked up. */
static void foreign(void) {
    int ends[2];
    check("pipe", pipe(ends));
    struct epoll_event event = {.events = EPOLLIN};
    int set = check("epoll_create1", epoll_create1(EPOLL_CLOEXEC));
    check("epoll_ctl", epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event));
    struct pollfd one = {.fd = ends[0], .events = POLLIN};
    expect("write", write(ends[1], buffer, SMALL), SMALL);
    for (int i = 0; i < CALLS; i++)
        expect("write", COUNTED(write(ends[1], buffer, SMALL)), SMALL);
    tell("write to a pipe");
    expect("read", read(ends[0], buffer, SMALL), SMALL);
    for (int i = 0; i < CALLS; i++)
        expect("read", COUNTED(read(ends[0], buffer, SMALL)), SMALL);
    tell("read from a pipe");
    expect("poll", poll(&one, 1, 0), 0);
    for (int i = 0; i < CALLS; i++)
        expect("poll", COUNTED(poll(&one, 1, 0)), 0);
    tell("poll of a pipe");
    expect("epoll_wait", epoll_wait(set, &event, 1, 0), 0);
    for (int i = 0; i < CALLS; i++)
        expect("epoll_wait", COUNTED(epoll_wait(set, &event, 1, 0)), 0);
    tell("epoll_wait for a pipe");
    check("close", close(set));
    for (int i = 0; i < CALLS; i++) {
        int file = check("open", open("/dev/null", O_WRONLY | O_CLOEXEC));
        check("close", COUNTED(close(file)));
    }
    tell("close of a file");
    close(ends[0]);
    close(ends[1]);
}

/* A process that has the other ends of the idle connections: one alone may not open so many files. */
struct crowd {
    int orders, process;
};

static struct crowd gather(void) {
    int ends[2], count;
    check("pipe", pipe(ends));
    struct crowd crowd = {.orders = ends[1], .process = check("fork", fork())};
    if (crowd.process != 0) {
        close(ends[0]);
        return crowd;
    }
    close(ends[1]);
    while (read(ends[0], &count, sizeof count) == sizeof count) {
        for (; count > 0; count--) {
            int client = check("socket", socket(AF_INET, SOCK_STREAM, 0));
            check("connect", connect(client, (struct sockaddr *)&address, sizeof address));
            for (int i = 0; i < WARM_UP; i++) {
                expect("send", send(client, buffer, SMALL, 0), SMALL);
                expect("recv", recv(client, buffer, SMALL, 0), SMALL);
            }
        }
    }
    exit(0);
}

/* One more upgraded connection, whose other end is there. */
static int joined(int listener, struct crowd crowd) {
    int one = 1, server;
    expect("write", write(crowd.orders, &one, sizeof one), sizeof one);
    server = check("accept", accept(listener, NULL, NULL));
    for (int i = 0; i < WARM_UP; i++) {
        expect("recv", recv(server, buffer, SMALL, 0), SMALL);
        expect("send", send(server, buffer, SMALL, 0), SMALL);
    }
    return server;
}

static int run(int most) {
    for (int i = 0; i < CALLS; i++)
        COUNTED(0);
    empty = shared->instructions / shared->calls;
    shared->calls = shared->instructions = 0;

    int listener = listen_somewhere(), status;
    struct crowd crowd = gather();
    foreign();
    struct pair pair = upgraded(listener);
    messages(pair);
    waits(pair);
    registrations(pair);
    close_pair(pair);
    /* Before the short ones, which teach the library to leave them alone. */
    lives(listener, WARM_UP, "connection of 64 round trips");
    struct pair *pairs = calloc(most, sizeof *pairs);
    if (pairs == NULL)
        fail("calloc");
    int open = 0;
    for (int count = READY; count <= most; count *= count < 1000 ? 100 : 10) {
        for (; open < count; open++) {
            if (open < READY)
                pairs[open] = upgraded(listener);
            else
                pairs[open].server = joined(listener, crowd);
        }
        epoll(pairs, count);
    }
    close(crowd.orders);
    check("waitpid", waitpid(crowd.process, &status, 0));
    expect("the crowd", status, 0);
    while (open > 0) {
        if (--open < READY)
            check("close", close(pairs[open].client));
        check("close", close(pairs[open].server));
    }
    lives(listener, 1, "connection of one round trip");
    return 0;
}

/* Counts the instructions of the child between int3 and `over`. */
static int trace(pid_t child) {
    int status;
    for (;;) {
        check("waitpid", waitpid(child, &status, 0));
        if (WIFEXITED(status))
            return WEXITSTATUS(status);
        if (WIFSIGNALED(status)) {
            fprintf(stderr, "hot_paths: killed by signal %d\n", WTERMSIG(status));
            return 1;
        }
        siginfo_t why;
        check("PTRACE_GETSIGINFO", ptrace(PTRACE_GETSIGINFO, child, 0, &why));
        int signal = WSTOPSIG(status);
        if (signal == SIGTRAP && why.si_code == SI_KERNEL) {
            signal = 0;
            shared->over = 0;
            while (!shared->over) {
                check("PTRACE_SINGLESTEP", ptrace(PTRACE_SINGLESTEP, child, 0, 0));
                check("waitpid", waitpid(child, &status, 0));
                if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) {
                    fprintf(stderr, "hot_paths: status %x within what is counted\n", status);
                    return 1;
                }
                shared->instructions++;
            }
            shared->calls++;
        } else if (signal == SIGTRAP) {
            signal = 0; /* exec */
        }
        check("PTRACE_CONT", ptrace(PTRACE_CONT, child, 0, signal));
    }
}

int main(int argc, char **argv) {
    int file = 9;
    if (argc == 3 && strcmp(argv[1], "--run") == 0) {
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (shared == MAP_FAILED)
            fail("mmap");
        return run(atoi(argv[2]));
    }
    if (argc < 2) {
        fprintf(stderr, "usage: hot_paths CONNECTIONS [LIBRARY]\n");
        return 2;
    }
    check("dup2", dup2(check("memfd_create", memfd_create("counts", 0)), file));
    check("ftruncate", ftruncate(file, sizeof *shared));
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared == MAP_FAILED)
        fail("mmap");
    pid_t child = check("fork", fork());
    if (child == 0) {
        check("PTRACE_TRACEME", ptrace(PTRACE_TRACEME, 0, 0, 0));
        if (argc > 2)
            check("setenv", setenv("LD_PRELOAD", argv[2], 1));
        execl("/proc/self/exe", argv[0], "--run", argv[1], NULL);
        fail("exec");
    }
    return trace(child);
}
