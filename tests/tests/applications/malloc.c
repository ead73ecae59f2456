/* A program with a malloc of its own, which no other thread may have while it forks: as an allocator that is linked into
 * the program, its handlers are registered by a constructor, after those of libraries. */

#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *old);

static pthread_mutex_t mine = PTHREAD_MUTEX_INITIALIZER;

static void take(void) { pthread_mutex_lock(&mine); }
static void give(void) { pthread_mutex_unlock(&mine); }

#define LOCKED(call)         \
    take();                  \
    void *memory = call;     \
    give();                  \
    return memory

void *malloc(size_t bytes) { LOCKED(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { LOCKED(__libc_calloc(count, bytes)); }
void *realloc(void *old, size_t bytes) { LOCKED(__libc_realloc(old, bytes)); }
void *memalign(size_t alignment, size_t bytes) { LOCKED(__libc_memalign(alignment, bytes)); }
void *aligned_alloc(size_t alignment, size_t bytes) { LOCKED(__libc_memalign(alignment, bytes)); }
int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    *memory = memalign(alignment, bytes);
    return 0;
}
void free(void *old) {
    take();
    __libc_free(old);
    give();
}

__attribute__((constructor)) static void register_handlers(void) { pthread_atfork(take, give, give); }

static void check(int holds, const char *what) {
    if (!holds) {
        perror(what);
        exit(1);
    }
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    check(connect(client, (struct sockaddr *)&address, length) == 0, "connect");
    int server = accept(listener, NULL, NULL);
    check(server >= 0, "accept");
    for (int round = 0; round < 40; round++) {
        char byte = 'a';
        check(send(client, &byte, 1, 0) == 1 && recv(server, &byte, 1, 0) == 1, "there");
        check(send(server, &byte, 1, 0) == 1 && recv(client, &byte, 1, 0) == 1, "back");
        if (round >= 30) {
            pid_t child = fork();
            check(child >= 0, "fork");
            if (child == 0) {
                free(malloc(100));
                _exit(0);
            }
            int status;
            check(waitpid(child, &status, 0) == child && status == 0, "child");
        }
    }
    puts("40 round trips, 10 children");
    return 0;
}
