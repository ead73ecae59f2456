"""PostgreSQL and Redis over TCP, Unix sockets and Thallus, for scripts/demo and scripts/bench."""
