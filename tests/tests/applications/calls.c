/* Things that only C programs do: each prints what happened, on a connection within the process. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int client, server;
static struct sockaddr_in address;
static int listener;

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void listens(void)
{
	socklen_t length = sizeof address;

	address.sin_family = AF_INET;
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
	check(listen(listener, 10) == 0, "listen");
	check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
}

static void connects(void)
{
	client = socket(AF_INET, SOCK_STREAM, 0);
	check(connect(client, (struct sockaddr *)&address, sizeof address) == 0, "connect");
	server = accept(listener, NULL, NULL);
	check(server >= 0, "accept");
}

static void exchanges(int rounds)
{
	char byte = 'x';

	for (int round = 0; round < rounds; round++) {
		check(write(client, &byte, 1) == 1 && read(server, &byte, 1) == 1, "request");
		check(write(server, &byte, 1) == 1 && read(client, &byte, 1) == 1, "answer");
	}
}

/* A thread that is about to read, and does nothing before it that sleeps. */
static _Atomic pid_t reader;

static void reads_now(void)
{
	reader = syscall(SYS_gettid);
}

static void await_asleep(void)
{
	char path[64], state = 'R';

	while (state != 'S') {
		FILE *stat;

		usleep(1000);
		snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)reader);
		stat = reader == 0 ? NULL : fopen(path, "r");
		if (stat != NULL) {
			check(fscanf(stat, "%*d (%*[^)]) %c", &state) == 1, "stat");
			fclose(stat);
		}
	}
}

static sigjmp_buf back;

static void jumps(int number)
{
	(void)number;
	siglongjmp(back, 1);
}

static void exits(int number)
{
	(void)number;
	pthread_exit((void *)7);
}

static void *leaves_a_read(void *unused)
{
	char byte;

	(void)unused;
	if (sigsetjmp(back, 1) == 0) {
		reads_now();
		read(server, &byte, 1);
	}
	pthread_exit((void *)7);
}

static void *reads(void *unused)
{
	char byte;

	(void)unused;
	reads_now();
	return (void *)(long)read(server, &byte, 1);
}

/* A thread that sleeps in its first read, or after many, gets a signal. */
static void interrupted(void *(*body)(void *), void (*handler)(int))
{
	for (int warm = 0; warm <= 50; warm += 50) {
		pthread_t thread;
		void *result = NULL;

		signal(SIGUSR1, handler);
		connects();
		exchanges(warm);
		reader = 0;
		check(pthread_create(&thread, NULL, body, NULL) == 0, "pthread_create");
		await_asleep();
		check(pthread_kill(thread, SIGUSR1) == 0, "pthread_kill");
		check(pthread_join(thread, &result) == 0, "pthread_join");
		printf("joined %ld\n", (long)result);
		exchanges(50);
		close(client);
		close(server);
	}
}

/* The kernel looks no further than its own table, whatever the number says. */
static void selects_and_polls(void)
{
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	fd_set *set = (fd_set *)(pages + 4096 - sizeof(fd_set));
	struct pollfd *list = (struct pollfd *)(pages + 4096 - sizeof(struct pollfd));
	int ends[2];

	check(pages != MAP_FAILED && mprotect(pages + 4096, 4096, PROT_NONE) == 0, "mprotect");
	connects();
	exchanges(50);
	check(write(client, "x", 1) == 1, "write");
	FD_ZERO(set);
	FD_SET(server, set);
	printf("select %d, ", select(1 << 20, set, NULL, NULL, NULL));
	printf("set %d\n", FD_ISSET(server, set) != 0);
	check(pipe(ends) == 0 && write(ends[1], "x", 1) == 1, "pipe");
	FD_ZERO(set);
	FD_SET(ends[0], set);
	printf("select %d, ", select(20000, set, NULL, NULL, NULL));
	printf("set %d\n", FD_ISSET(ends[0], set) != 0);
	list->fd = server;
	list->events = POLLIN;
	printf("poll %d, ", poll(list, 0x7fffffff, 0));
	printf("%s\n", strerror(errno));
}

/* A child that no fork handler sees closes what it inherited, and makes a socket of the same number. */
static void cloned(void)
{
	for (int warm = 1; warm <= 51; warm += 50) {
		int status = -1;
		pid_t child;

		connects();
		exchanges(warm);
		child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
		check(child >= 0, "clone");
		if (child == 0) {
			close(client);
			check(socket(AF_INET, SOCK_STREAM, 0) == client, "socket");
			_exit(0);
		}
		check(waitpid(child, &status, 0) == child, "waitpid");
		printf("child %d\n", status);
		exchanges(50);
		for (int count = 0; count < 3; count++) {
			int ends[] = {client, server};

			connects();
			exchanges(count ? 50 : 3);
			client = ends[0];
			server = ends[1];
			exchanges(50);
		}
	}
}

/* A number that was a TCP socket's becomes another's, unseen. */
static void numbers_again(void)
{
	struct sockaddr_in other = {.sin_family = AF_INET, .sin_port = htons(9), .sin_addr = {htonl(INADDR_LOOPBACK)}};
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	check(fd >= 0 && syscall(SYS_close_range, fd, fd, 0) == 0, "close_range");
	check(socket(AF_INET, SOCK_DGRAM, 0) == fd, "socket");
	check(connect(fd, (struct sockaddr *)&other, sizeof other) == 0, "connect");
	for (int count = 0; count < 20; count++)
		send(fd, "x", 1, 0);
	printf("sent\n");
}

static void makes_a_socket(int signal)
{
	(void)signal;
	close(socket(AF_INET, SOCK_STREAM, 0));
}

static void *first_socket(void *begun)
{
	*(volatile int *)begun = 1;
	makes_a_socket(0);
	return NULL;
}

/* What comes while a process makes its first socket: a handler that makes one, and a fork whose child does. Each child of this one
   has its first before it. */
static void meanwhile(int forks)
{
	int statuses = 0;

	for (int count = 1; count <= 50; count++) {
		int status = -1;
		pid_t child = fork();

		check(child >= 0, "fork");
		if (child == 0) {
			volatile int begun = 0;
			pthread_t thread;

			if (!forks) {
				const struct itimerval soon = {.it_value = {0, 10 * count}};

				signal(SIGALRM, makes_a_socket);
				check(setitimer(ITIMER_REAL, &soon, NULL) == 0, "setitimer");
				makes_a_socket(0);
				_exit(0);
			}
			check(pthread_create(&thread, NULL, first_socket, (void *)&begun) == 0, "pthread_create");
			while (!begun)
				;
			child = fork();
			if (child == 0) {
				makes_a_socket(0);
				_exit(0);
			}
			check(waitpid(child, &status, 0) == child, "waitpid");
			pthread_join(thread, NULL);
			_exit(status != 0);
		}
		check(waitpid(child, &status, 0) == child, "waitpid");
		statuses |= status;
	}
	printf("first sockets %d\n", statuses);
}

/* What libc's functions do, asked of syscall. What there was is counted before the program is replaced. */
static void by_syscall(char *program)
{
	static const struct timespec fixed = {0, 1000000};
	const sigset_t *none = NULL;
	struct { const sigset_t *set; size_t bytes; } mask = {none, 8};
	struct timespec time = {30, 0}, soon = {0, 1000000};
	struct pollfd one = {.events = POLLIN};
	struct iovec piece;
	char bytes[4];
	char *const arguments[] = {program, "executed", NULL};
	fd_set set;

	connects();
	exchanges(1000);
	one.fd = client;
	piece = (struct iovec){"abc", 3};
	printf("pwritev2 %ld\n", syscall(SYS_pwritev2, server, &piece, 1, -1L, 0L, 0));
	FD_ZERO(&set);
	FD_SET(client, &set);
	printf("pselect6 %ld", syscall(SYS_pselect6, client + 1, &set, NULL, NULL, &time, &mask));
	printf(" %d, time is left: %d\n", FD_ISSET(client, &set) != 0, time.tv_sec > 0 && time.tv_sec < 30);
	printf("ppoll %ld", syscall(SYS_ppoll, &one, 1, &time, NULL, (size_t)8));
	printf(" %d, time is left: %d\n", one.revents, time.tv_sec > 0 && time.tv_sec < 30);
	piece = (struct iovec){bytes, sizeof bytes};
	printf("preadv2 %ld\n", syscall(SYS_preadv2, client, &piece, 1, -1L, 0L, 0));
	printf("ppoll %ld", syscall(SYS_ppoll, &one, 1, &soon, NULL, (size_t)8));
	printf(", time is left: %d\n", soon.tv_sec != 0 || soon.tv_nsec != 0);
	printf("ppoll %ld\n", syscall(SYS_ppoll, &one, 1, &fixed, NULL, (size_t)8));
	printf("preadv2 %ld", syscall(SYS_preadv2, client, &piece, 1, -1L, 0L, RWF_NOWAIT));
	printf(" %d\n", errno);
	syscall(SYS_execve, "/proc/self/exe", arguments, environ);
	perror("execve");
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IONBF, 0);
	signal(SIGPIPE, SIG_IGN);
	alarm(60);
	check(argc == 2, "usage");
	if (strncmp(argv[1], "meanwhile", 9) == 0) {
		meanwhile(strcmp(argv[1], "meanwhile-a-fork") == 0);
		return 0;
	}
	if (strcmp(argv[1], "executed") == 0) {
		printf("executed\n");
		return 0;
	}
	listens();
	if (strcmp(argv[1], "leaves-a-read") == 0)
		interrupted(leaves_a_read, jumps);
	else if (strcmp(argv[1], "exits-in-a-handler") == 0)
		interrupted(reads, exits);
	else if (strcmp(argv[1], "selects-and-polls") == 0)
		selects_and_polls();
	else if (strcmp(argv[1], "cloned") == 0)
		cloned();
	else if (strcmp(argv[1], "by-syscall") == 0)
		by_syscall(argv[0]);
	else if (strcmp(argv[1], "numbers-again") == 0)
		numbers_again();
	else
		return 2;
	return 0;
}
