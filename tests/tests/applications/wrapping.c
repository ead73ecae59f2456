/*
 * With -DLIBRARY a library whose functions are the system calls of their names, made by libc's syscall. Without, a
 * program that exchanges messages with itself by them, on a thread with an epoll set and on one that polls and selects.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef LIBRARY

static long calls;

static long made(long result)
{
	__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	return result;
}

#define WRAP(type, name, parameters, ...) \
	type name parameters { return made(syscall(__VA_ARGS__)); }

WRAP(ssize_t, read, (int fd, void *to, size_t most), SYS_read, fd, to, most)
WRAP(ssize_t, write, (int fd, const void *from, size_t bytes), SYS_write, fd, from, bytes)
WRAP(ssize_t, recv, (int fd, void *to, size_t most, int flags), SYS_recvfrom, fd, to, most, flags, NULL, NULL)
WRAP(ssize_t, send, (int fd, const void *from, size_t bytes, int flags), SYS_sendto, fd, from, bytes, flags, NULL, 0)
WRAP(ssize_t, recvmsg, (int fd, struct msghdr *message, int flags), SYS_recvmsg, fd, message, flags)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr *message, int flags), SYS_sendmsg, fd, message, flags)
WRAP(int, ppoll, (struct pollfd *fds, nfds_t count, const struct timespec *time, const sigset_t *mask),
     SYS_ppoll, fds, count, time, mask, (size_t)8)
WRAP(int, epoll_ctl, (int set, int operation, int fd, struct epoll_event *event),
     SYS_epoll_ctl, set, operation, fd, event)
WRAP(int, epoll_pwait, (int set, struct epoll_event *events, int most, int time, const sigset_t *mask),
     SYS_epoll_pwait, set, events, most, time, mask, (size_t)8)
WRAP(int, setsockopt, (int fd, int level, int name, const void *value, socklen_t bytes),
     SYS_setsockopt, fd, level, name, value, bytes)
WRAP(int, connect, (int fd, const struct sockaddr *address, socklen_t bytes), SYS_connect, fd, address, bytes)
WRAP(int, listen, (int fd, int most), SYS_listen, fd, most)
WRAP(int, accept, (int fd, struct sockaddr *restrict address, socklen_t *restrict bytes),
     SYS_accept, fd, address, bytes)
WRAP(int, shutdown, (int fd, int how), SYS_shutdown, fd, how)
WRAP(int, dup, (int fd), SYS_dup, fd)
WRAP(int, close, (int fd), SYS_close, fd)

__attribute__((destructor)) static void tell(void)
{
	static const char text[] = "wrapped\n";

	if (calls > 0)
		syscall(SYS_write, STDERR_FILENO, text, sizeof text - 1);
}

#else

#define ROUNDS 2000
#define MESSAGE 100

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void *answer(void *listener)
{
	struct epoll_event event = { .events = EPOLLIN };
	int fd = accept(*(int *)listener, NULL, NULL), set = epoll_create1(0);
	char bytes[MESSAGE];
	ssize_t found;

	check(fd >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "accept");
	do {
		check(epoll_pwait(set, &event, 1, -1, NULL) == 1, "epoll_pwait");
		found = read(fd, bytes, sizeof bytes);
		check(found >= 0 && send(fd, bytes, found, MSG_NOSIGNAL) == found, "answer");
	} while (found > 0);
	close(set);
	close(fd);
	return NULL;
}

int main(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0), fd = socket(AF_INET, SOCK_STREAM, 0);
	char bytes[MESSAGE];
	pthread_t thread;

	check(bind(listener, (struct sockaddr *)&address, length) == 0 && listen(listener, 1) == 0, "listen");
	check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
	check(pthread_create(&thread, NULL, answer, &listener) == 0, "pthread_create");
	check(connect(fd, (struct sockaddr *)&address, length) == 0, "connect");
	for (int round = 0; round < ROUNDS; round++) {
		size_t found = 0;

		memset(bytes, round, sizeof bytes);
		check(write(fd, bytes, sizeof bytes) == sizeof bytes, "write");
		while (found < sizeof bytes) {
			struct pollfd one = { .fd = fd, .events = POLLIN };
			fd_set set;
			ssize_t more;

			FD_ZERO(&set);
			FD_SET(fd, &set);
			if (round % 2)
				check(ppoll(&one, 1, NULL, NULL) == 1, "ppoll");
			else
				check(select(fd + 1, &set, NULL, NULL, NULL) == 1, "select");
			more = recv(fd, bytes + found, sizeof bytes - found, 0);
			check(more > 0, "recv");
			found += more;
		}
		for (int at = 0; at < MESSAGE; at++)
			check(bytes[at] == (char)round, "another byte");
	}
	check(shutdown(fd, SHUT_WR) == 0 && recv(fd, bytes, 1, 0) == 0, "end");
	pthread_join(thread, NULL);
	close(fd);
	printf("%d rounds\n", ROUNDS);
	return 0;
}

#endif
