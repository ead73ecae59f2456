/* What deepbind.c loads: a module, a library that comes with it (HELPER), one that loads for others (CALLER), and one whose constructor
   starts a thread (STARTING). And what may be preloaded beside the library (BESIDE). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined CALLER

void *loads(const char *name, int flags)
{
	void *volatile module = dlopen(name, flags);

	return module;
}

#elif defined HELPER

/* Takes a byte once there is one, and gives it back. */
int helps(int fd)
{
	struct pollfd asked = { .fd = fd, .events = POLLIN };
	char byte;

	return poll(&asked, 1, -1) == 1 && recv(fd, &byte, 1, 0) == 1 && send(fd, &byte, 1, 0) == 1;
}

#elif defined STARTING

/* The program's. */
void *both_ends(void *unused);

__attribute__((constructor)) static void begins(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, both_ends, NULL) == 0)
		pthread_join(thread, NULL);
}

#elif defined BESIDE

/* Looks for libc's own when it is called. */
int poll(struct pollfd *asked, nfds_t count, int timeout)
{
	int (*own)(struct pollfd *, nfds_t, int) = (int (*)(struct pollfd *, nfds_t, int))dlsym(RTLD_NEXT, "poll");

	return own(asked, count, timeout);
}

#else

int helps(int fd);

/* The program's. */
extern int early;

/* The program has one, too. */
const char *name(void)
{
	return "the module";
}

const char *whose(void)
{
	return name();
}

static int (*volatile waits)(struct pollfd *, nfds_t, int) = poll;

static const struct {
	ssize_t (*takes)(int, const struct iovec *, int);
	ssize_t (*gives)(int, const struct iovec *, int);
} calls = { readv, writev };

const void *address_of_poll(void)
{
	return (const void *)waits;
}

/* By calls, by pointers, and by what it depends on. */
int serves(int fd)
{
	struct pollfd asked = { .fd = fd, .events = POLLIN };
	char byte;
	struct iovec list = { &byte, 1 };

	return poll(&asked, 1, -1) == 1 && read(fd, &byte, 1) == 1 && write(fd, &byte, 1) == 1
		&& waits(&asked, 1, -1) == 1 && calls.takes(fd, &list, 1) == 1 && calls.gives(fd, &list, 1) == 1
		&& helps(fd);
}

__attribute__((constructor)) static void begins(void)
{
	if (early != 0) {
		helps(early);
		early = 0;
	}
}

#endif
