/* A small program that may lock the usual 8 MiB, which is more than it has mapped: when it starts, and while it is connected to itself. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define PAIRS 4
#define PAGES 16

static void check(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

/* Who has the privilege may lock all there is. */
static void be_user(int yes) { check(seteuid(getuid() == 0 && yes ? 1 : getuid()) == 0, "seteuid"); }

static void lock(const char *when, int flags) {
    be_user(1);
    int result = mlockall(flags);
    printf("%s: %s\n", when, result == 0 ? "locked" : strerror(errno));
    be_user(0);
}

static char *pages(void) {
    char *start = mmap(NULL, PAGES * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(start != MAP_FAILED, "mmap");
    return start;
}

static int resident(char *start) {
    unsigned char has[PAGES];
    check(mincore(start, PAGES * 4096, has) == 0, "mincore");
    int count = 0;
    for (int i = 0; i < PAGES; i++)
        count += has[i] & 1;
    return count;
}

static long shared(void) {
    FILE *file = fopen("/proc/self/status", "re");
    check(file != NULL, "/proc/self/status");
    char line[256];
    long kilobytes = -1;
    while (fgets(line, sizeof line, file))
        sscanf(line, "RssShmem: %ld", &kilobytes);
    fclose(file);
    return kilobytes;
}

static void use(int ends[PAIRS][2]) {
    char byte = 1;
    for (int round = 0; round < 100; round++)
        for (int i = 0; i < PAIRS; i++)
            for (int end = 0; end < 2; end++) {
                check(send(ends[i][end], &byte, 1, 0) == 1, "send");
                check(recv(ends[i][1 - end], &byte, 1, 0) == 1, "recv");
            }
}

int main(void) {
    struct rlimit limit = {8 << 20, 8 << 20};
    check(setrlimit(RLIMIT_MEMLOCK, &limit) == 0, "setrlimit");
    lock("at the start", MCL_CURRENT | MCL_FUTURE);

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), ends[PAIRS][2];
    check(bind(listener, (void *)&address, length) == 0, "bind");
    check(listen(listener, PAIRS) == 0, "listen");
    check(getsockname(listener, (void *)&address, &length) == 0, "getsockname");
    for (int i = 0; i < PAIRS; i++) {
        ends[i][0] = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(ends[i][0], (void *)&address, length) == 0, "connect");
        ends[i][1] = accept(listener, NULL, NULL);
        check(ends[i][1] >= 0, "accept");
    }
    use(ends);
    lock("connected", MCL_CURRENT);
    char *before = pages();
    lock("again", MCL_CURRENT | MCL_FUTURE);
    char *after = pages();
    printf("%d and %d pages\n", resident(before), resident(after));
    use(ends);
    if (shared() > 4096)
        printf("%ld kB are shared\n", shared());
    limit.rlim_cur = 1 << 20;
    check(setrlimit(RLIMIT_MEMLOCK, &limit) == 0, "setrlimit");
    lock("beyond", MCL_CURRENT);
    use(ends);
    return 0;
}
