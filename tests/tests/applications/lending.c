// A client and a server that know of the library: bodies are lent where that is possible, and sent otherwise. Prints the
// same either way, and to the file named by the first argument how many were lent.
#define _GNU_SOURCE
#include "thallus.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

_Static_assert(sizeof(struct thallus_status) == 96, "as in Rust");
_Static_assert(offsetof(struct thallus_status, ring_bytes_sent) == 16, "as in Rust");
_Static_assert(offsetof(struct thallus_status, spare_bytes) == 56, "as in Rust");
_Static_assert(offsetof(struct thallus_status, reason) == 64, "as in Rust");
_Static_assert(sizeof(struct thallus_handle) == 32, "as in Rust");
_Static_assert(sizeof(struct thallus_functions) == 10 * sizeof(void *), "functions only");

enum { BODIES = 100, BYTES = 300000 };

struct announcement {
    int lent;
    struct thallus_handle handle;
};

static struct thallus_functions thallus;
static int found;

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void put(int fd, const void *bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t sent = send(fd, (const char *)bytes + done, count - done, MSG_NOSIGNAL);
        check(sent > 0, "send");
        done += (size_t)sent;
    }
}

static void get(int fd, void *bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t received = recv(fd, (char *)bytes + done, count - done, 0);
        check(received > 0, "recv");
        done += (size_t)received;
    }
}

static unsigned long sum(const unsigned char *bytes, size_t count) {
    unsigned long sum = 0;
    for (size_t i = 0; i < count; i++)
        sum = sum * 31 + bytes[i];
    return sum;
}

static int can_lend(int fd) {
    struct thallus_status status = {.size = sizeof status};
    if (!found)
        return 0;
    check(thallus.status(fd, &status) == 0 && status.size == sizeof status, "thallus_status");
    check((status.fabric == THALLUS_TCP) == (status.reason[0] != 0), "reason");
    return (status.flags & THALLUS_CAN_LEND) != 0;
}

static void serve(int fd, const char *report) {
    static unsigned char body[BYTES];
    int lent = 0;
    for (int i = 0; i < BODIES; i++) {
        char request;
        get(fd, &request, 1);
        struct announcement announcement = {0};
        void *target = body;
        struct thallus_memory *memory = NULL;
        if (can_lend(fd)) {
            memory = thallus.allocate(fd, BYTES, &target);
            check(memory != NULL, "thallus_allocate");
            check(thallus.lend(memory, 0, BYTES, &announcement.handle) == 0, "thallus_lend");
            announcement.lent = 1;
            lent++;
        }
        for (int at = 0; at < BYTES; at++)
            ((unsigned char *)target)[at] = (unsigned char)(i + at * 7);
        put(fd, &announcement, sizeof announcement);
        if (!memory)
            put(fd, body, BYTES);
        else
            thallus.free(memory);
    }
    FILE *file = fopen(report, "w");
    check(file != NULL, report);
    if (found && lent) {
        check(thallus.trim(fd) == 0, "thallus_trim");
    }
    fprintf(file, "%d\n", lent);
    fclose(file);
}

static unsigned long ask(int fd) {
    static unsigned char body[BYTES];
    struct announcement announcement;
    static int borrow;
    put(fd, "?", 1);
    get(fd, &announcement, sizeof announcement);
    if (!announcement.lent) {
        get(fd, body, BYTES);
        return sum(body, BYTES);
    }
    check(found, "thallus_find");
    borrow = !borrow;
    if (!borrow) {
        struct iovec parts[2] = {{body, 1000}, {body + 1000, BYTES - 1000}};
        check(thallus.pull(fd, &announcement.handle, parts, 2) == BYTES, "thallus_pull");
        check(thallus.pull(fd, &announcement.handle, parts, 2) == -1 && errno == EINVAL, "pulled twice");
        return sum(body, BYTES);
    }
    const void *address;
    size_t bytes;
    struct thallus_loan *loan = thallus.borrow(fd, &announcement.handle, &address, &bytes);
    check(loan != NULL && bytes == BYTES, "thallus_borrow");
    unsigned long result = sum(address, bytes);
    thallus.give_back(loan);
    return result;
}

static void refuse_nulls(void) {
    struct thallus_handle handle = {{0}};
    const void *address;
    size_t bytes;
    struct iovec part = {&bytes, sizeof bytes};
    check(thallus.status(0, NULL) == -1 && errno == EFAULT, "no status");
    check(thallus.allocate(0, 1, NULL) == NULL && errno == EFAULT, "no address");
    check(thallus.lend(NULL, 0, 1, &handle) == -1 && errno == EFAULT, "no memory");
    check(thallus.loans(NULL) == -1 && errno == EFAULT, "no memory");
    check(thallus.borrow(0, NULL, &address, &bytes) == NULL && errno == EFAULT, "no handle");
    check(thallus.borrow(0, &handle, NULL, &bytes) == NULL && errno == EFAULT, "no address");
    check(thallus.borrow(0, &handle, &address, NULL) == NULL && errno == EFAULT, "no bytes");
    check(thallus.pull(0, NULL, &part, 1) == -1 && errno == EFAULT, "no handle");
    check(thallus.pull(0, &handle, NULL, 1) == -1 && errno == EFAULT, "no list");
    check(thallus.pull(0, &handle, &part, -1) == -1 && errno == EINVAL, "fewer than none");
    check(thallus.pull(0, &handle, &part, 1025) == -1 && errno == EINVAL, "too many");
    check(thallus.pull(0, &handle, NULL, 0) == -1 && errno == ENOTCONN, "none");
}

int main(int count, char **arguments) {
    check(count == 2, "usage: lending REPORT");
    found = thallus_find(&thallus) == 0;
    if (found) {
        struct thallus_status status = {.size = sizeof status};
        check(thallus.api() == THALLUS_API, "thallus_api");
        check(thallus.status(0, &status) == -1 && errno == ENOTCONN, "no connection");
        status.size = 15;
        check(thallus.status(0, &status) == -1 && errno == EINVAL, "too small");
        void *address;
        check(thallus.allocate(0, 1, &address) == NULL && errno == ENOTCONN, "no connection");
        thallus.free(NULL);
        thallus.give_back(NULL);
        refuse_nulls();
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    pid_t child = fork();
    if (child == 0) {
        serve(accept(listener, NULL, NULL), arguments[1]);
        return 0;
    }
    close(listener);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(connect(fd, (struct sockaddr *)&address, length) == 0, "connect");
    unsigned long all = 0;
    for (int i = 0; i < BODIES; i++)
        all = all * 31 + ask(fd);
    int status;
    check(waitpid(child, &status, 0) == child && status == 0, "the server");
    printf("%d bodies, %lx\n", BODIES, all);
    return 0;
}
