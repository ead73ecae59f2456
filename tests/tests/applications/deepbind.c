/* Loads modules that look for libc's names in libc, not in what was preloaded (RTLD_DEEPBIND), and has them serve one end of
   a connection within the process. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

int early;

const char *name(void)
{
	return "the program";
}

static void check(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void *loaded(void *module)
{
	if (module == NULL) {
		printf("%s\n", dlerror());
		exit(1);
	}
	return module;
}

static void *found(void *module, const char *symbol)
{
	return loaded(dlsym(module, symbol));
}

static int client, server;

static void connects(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof address;
	int listener = socket(AF_INET, SOCK_STREAM, 0);

	check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
	check(listen(listener, 10) == 0, "listen");
	check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
	client = socket(AF_INET, SOCK_STREAM, 0);
	check(connect(client, (struct sockaddr *)&address, sizeof address) == 0, "connect");
	server = accept(listener, NULL, NULL);
	check(server >= 0, "accept");
}

static void exchanges(void)
{
	char byte = 'x';

	for (int round = 0; round < 40; round++) {
		check(write(client, &byte, 1) == 1 && read(server, &byte, 1) == 1, "request");
		check(write(server, &byte, 1) == 1 && read(client, &byte, 1) == 1, "answer");
	}
}

/* The connection has left TCP by now; the module serves it. */
static void is_served_by(void *module)
{
	int (*serves)(int) = (int (*)(int))found(module, "serves");
	char bytes[3] = "";

	check(write(client, "abc", 3) == 3, "write");
	printf("served: %d\n", serves(server));
	for (int left = 3; left > 0;)
		left -= read(client, bytes + 3 - left, left);
	printf("answer: %.3s\n", bytes);
	printf("name: %s\n", ((const char *(*)(void))found(module, "whose"))());
}

static void serves_with(int flags)
{
	connects();
	exchanges();
	is_served_by(loaded(dlopen("./module.so", flags)));
}

/* The module was there first. */
static void serves_later(void)
{
	void *module = loaded(dlopen("./module.so", RTLD_LAZY | RTLD_DEEPBIND));

	connects();
	exchanges();
	is_served_by(module);
}

/* The connection has left TCP, and all that was sent has been read. */
static void has_to_go_back(void)
{
	void *module;

	connects();
	exchanges();
	module = loaded(dlopen("./module.so", RTLD_LAZY | RTLD_DEEPBIND));
	exchanges();
	is_served_by(module);
}

static void serves_from_another_call(void)
{
	connects();
	exchanges();
	is_served_by(loaded(dlmopen(LM_ID_BASE, "./module.so", RTLD_NOW | RTLD_DEEPBIND)));
}

static void constructor(void)
{
	char byte = 0;

	connects();
	exchanges();
	check(write(client, "c", 1) == 1, "write");
	early = server;
	loaded(dlopen("./module.so", RTLD_NOW | RTLD_DEEPBIND));
	check(read(client, &byte, 1) == 1, "read");
	printf("the constructor answered %c, and left %d\n", byte, early);
}

/* The path along which dlopen looks is that of the library that calls it. */
static void caller(void)
{
	void *(*loads)(const char *, int) =
		(void *(*)(const char *, int))found(loaded(dlopen("./caller.so", RTLD_NOW)), "loads");
	void *module;

	printf("the program finds it: %d\n", dlopen("plugin.so", RTLD_NOW | RTLD_DEEPBIND) != NULL);
	printf("%s\n", dlerror());
	printf("and then: %s\n", dlerror() == NULL ? "nothing" : "more");
	printf("it needs flags: %d\n", dlopen("./module.so", RTLD_DEEPBIND) != NULL);
	printf("%s\n", dlerror());
	connects();
	exchanges();
	errno = 77;
	module = loads("plugin.so", RTLD_LAZY | RTLD_DEEPBIND);
	printf("errno: %d\n", errno);
	is_served_by(loaded(module));
}

static void *loads_in_a_thread(void *gate)
{
	pthread_barrier_wait(gate);
	return loaded(dlopen("./module.so", RTLD_LAZY | RTLD_DEEPBIND));
}

/* Several load, while others use what is hooked for the first time. */
static void threads(void)
{
	pthread_t loaders[4];
	pthread_barrier_t gate;
	void *module = NULL;

	pthread_barrier_init(&gate, NULL, 5);
	for (int i = 0; i < 4; i++)
		check(pthread_create(&loaders[i], NULL, loads_in_a_thread, &gate) == 0, "pthread_create");
	pthread_barrier_wait(&gate);
	connects();
	exchanges();
	for (int i = 0; i < 4; i++)
		check(pthread_join(loaders[i], &module) == 0, "pthread_join");
	is_served_by(module);
}

/* A child serves, which loads the module itself. */
static void child(void)
{
	int status;

	connects();
	exchanges();
	check(write(client, "abc", 3) == 3, "write");
	if (fork() == 0) {
		int (*serves)(int) = (int (*)(int))found(loaded(dlopen("./module.so", RTLD_NOW | RTLD_DEEPBIND)), "serves");

		exit(serves(server) ? 7 : 1);
	}
	check(wait(&status) > 0, "wait");
	printf("the child: %d\n", WEXITSTATUS(status));
}

/* By functions that are asked of libc, as foreign function interfaces do. */
static void asked(void)
{
	void *libc = loaded(dlopen("libc.so.6", RTLD_LAZY));
	int (*waits)(struct pollfd *, nfds_t, int) = (int (*)(struct pollfd *, nfds_t, int))found(libc, "poll");
	ssize_t (*takes)(int, void *, size_t, int) = (ssize_t (*)(int, void *, size_t, int))found(libc, "recv");
	struct pollfd wanted = { .events = POLLIN };
	char byte = 0;

	connects();
	exchanges();
	check(write(client, "l", 1) == 1, "write");
	wanted.fd = server;
	printf("ready: %d\n", waits(&wanted, 1, -1));
	printf("taken: %d\n", (int)takes(server, &byte, 1, 0));
	printf("%c\n", byte);
}

/* Where the module's names of libc's lead to. */
static void names(void)
{
	void *module = loaded(dlopen("./module.so", RTLD_NOW | RTLD_DEEPBIND));
	const void *address = ((const void *(*)(void))found(module, "address_of_poll"))();
	Dl_info info;

	check(dladdr(address, &info) != 0, "dladdr");
	printf("%s\n", strrchr(info.dli_fname, '/') + 1);
}

/* For starting.so. */
void *both_ends(void *unused)
{
	connects();
	exchanges();
	return unused;
}

/* A constructor waits for a thread that uses what is hooked for the first time. */
static void starting(void)
{
	loaded(dlopen("./starting.so", RTLD_NOW));
	printf("the thread has ended\n");
}

/* What is hooked is used for the first time before the program asks why it can't have a module. */
static void message(void)
{
	printf("there is one: %d\n", dlopen("./nothing.so", RTLD_NOW) != NULL);
	connects();
	exchanges();
	printf("%s\n", dlerror());
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} parts[] = {
		{ "later", serves_later }, { "back", has_to_go_back }, { "dlmopen", serves_from_another_call }, { "constructor", constructor },
		{ "caller", caller }, { "threads", threads }, { "child", child }, { "names", names }, { "asked", asked },
		{ "starting", starting }, { "message", message },
	};

	check(count == 2, "one part is to be named");
	if (strcmp(arguments[1], "now") == 0)
		serves_with(RTLD_NOW | RTLD_DEEPBIND);
	else if (strcmp(arguments[1], "lazy") == 0)
		serves_with(RTLD_LAZY | RTLD_DEEPBIND);
	for (size_t part = 0; part < sizeof parts / sizeof parts[0]; part++)
		if (strcmp(arguments[1], parts[part].name) == 0)
			parts[part].run();
	return 0;
}
