/* Echoes on each connection, in a process of its own. Argument: the port. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(count > 1 ? atoi(arguments[1]) : 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    signal(SIGCHLD, SIG_IGN);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16))
        return 1;
    for (;;) {
        static char buffer[65536];
        int connection = accept(listener, NULL, NULL);
        ssize_t got;

        if (connection >= 0 && !fork()) {
            while ((got = read(connection, buffer, sizeof buffer)) > 0)
                for (ssize_t sent = 0, more; sent < got; sent += more)
                    if ((more = write(connection, buffer + sent, got - sent)) < 0)
                        return 1;
            return 0;
        }
        close(connection);
    }
}
