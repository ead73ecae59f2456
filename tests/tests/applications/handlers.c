/* A program that forks while another of its threads, with a library's lock, opens, uses and closes connections. The library has
 * registered its fork handlers, which take the lock, before the program began. */

#ifdef LIBRARY

#include <pthread.h>

pthread_mutex_t library = PTHREAD_MUTEX_INITIALIZER;

static void take(void) { pthread_mutex_lock(&library); }
static void give(void) { pthread_mutex_unlock(&library); }

__attribute__((constructor)) static void register_handlers(void) { pthread_atfork(take, give, give); }

#else

#include <arpa/inet.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHILDREN 300
#define ROUNDS 20

extern pthread_mutex_t library;
static atomic_int ended;
static int listener;
static struct sockaddr_in address = {.sin_family = AF_INET};

static void check(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void pass(int from, int to) {
    char byte = 1;
    check(send(from, &byte, 1, 0) == 1 && recv(to, &byte, 1, 0) == 1, "pass");
}

static void *use(void *none) {
    while (!ended) {
        pthread_mutex_lock(&library);
        int client = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(client, (struct sockaddr *)&address, sizeof address) == 0, "connect");
        int server = accept(listener, NULL, NULL);
        check(server >= 0, "accept");
        for (int round = 0; round < ROUNDS; round++) {
            pass(client, server);
            pass(server, client);
        }
        close(client);
        close(server);
        pthread_mutex_unlock(&library);
        usleep(10);
    }
    return none;
}

int main(void) {
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    pthread_t user;
    check(pthread_create(&user, NULL, use, NULL) == 0, "pthread_create");
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        check(child >= 0, "fork");
        if (child == 0)
            _exit(0);
        int status;
        check(waitpid(child, &status, 0) == child && status == 0, "child");
    }
    ended = 1;
    check(pthread_join(user, NULL) == 0, "pthread_join");
    printf("%d children\n", CHILDREN);
    return 0;
}

#endif
