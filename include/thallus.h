/*
 * thallus.h: what a program that knows of Thallus can ask of it.
 *
 * Nothing has to be linked. The functions are in libthallus_shim.so, which is there if the program was started with it:
 *
 *     struct thallus_functions thallus;
 *     struct thallus_status status = {.size = sizeof status};
 *     if (thallus_find(&thallus) == 0 && thallus.status(fd, &status) == 0) ...
 *
 * Without it thallus_find() fails, and the program does what it would do over TCP. Link with -ldl before glibc 2.34.
 *
 * Two things are here: the status of a connection, and memory that the two ends of a connection on one host lend each
 * other. Memory that is lent is not part of the byte stream. The owner writes to it, lends it, and sends the handle to
 * its peer in the protocol of the two programs; the peer reads the memory in place, or copies out of it, and gives it
 * back. So bytes are copied once or not at all, where the stream copies them twice. A handle is of use once, on the
 * connection that it was made for, at the other end. If the connection goes back to TCP, what has been
 * lent stays lent and can be taken, but not by another program that the connection is passed to, nor by one that has installed a
 * seccomp filter: from then on the library knows no connection, and what there is can only be used, given back and freed.
 *
 * All functions may be called by any thread, but not by signal handlers. Those that fail set errno: EFAULT for a null pointer,
 * one of those named here, or one of mremap(2)'s or madvise(2)'s. None waits for the peer. In a child made by fork(2), what
 * its parent allocated or borrowed can be read and freed, which gives nothing back; the parent does that.
 */
#ifndef THALLUS_H
#define THALLUS_H

#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Older C libraries have it for GNU sources only. */
#ifndef RTLD_DEFAULT
#define RTLD_DEFAULT ((void *)0)
#endif

/* The version of this interface. Functions and fields are only ever added. */
#define THALLUS_API 1

/* What carries the bytes of a connection now. */
#define THALLUS_TCP 0 /* the kernel's socket, be it TCP or a Unix socket */
#define THALLUS_SHM 1
#define THALLUS_VERBS 2

/* Flags of a status. */
#define THALLUS_CAN_LEND 1 /* thallus_allocate() may succeed, as far as can be told without trying */
#define THALLUS_TRUSTED 2  /* thallus_borrow() may succeed: when they met the peer was a process that may trace this one */
#define THALLUS_RETURNED 4 /* it had left TCP, and went back */

struct thallus_status {
    uint32_t size; /* to be set to sizeof(struct thallus_status); then what of it has been filled in, in bytes */
    uint32_t fabric;
    uint32_t flags;
    uint32_t reserved;
    uint64_t ring_bytes_sent; /* application bytes, as in the statistics */
    uint64_t ring_bytes_received;
    uint64_t tcp_bytes_sent;
    uint64_t tcp_bytes_received;
    uint64_t lent_bytes;  /* of this end's memory: allocated, or freed and not yet given back */
    uint64_t spare_bytes; /* of this end's memory: kept for the next allocation */
    char reason[32];      /* why it is on TCP, as thallus status shows it; empty otherwise */
};

/* Where a loan is. Opaque: to be sent as it is. */
struct thallus_handle {
    unsigned char bytes[32];
};

struct thallus_memory;
struct thallus_loan;

/*
 * The version of the interface that the library has.
 */
unsigned thallus_api(void);

/*
 * Fills in the status of the connection behind fd. 0, or -1: ENOTCONN if fd is no connection that the library knows,
 * EINVAL if size is less than 16. Also enters what the peer has given back.
 */
#if defined(__cplusplus) && defined(__GNUC__)
/* The function hides the structure's constructor, which nobody misses. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"
#endif
int thallus_status(int fd, struct thallus_status *status);
#if defined(__cplusplus) && defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

/*
 * Allocates memory that can be lent to the peer. Its address, on a page, goes to *address; what it holds at first is
 * undefined. NULL: EOPNOTSUPP if the connection is not over shared memory, or its segment was made without room for loans;
 * ENOBUFS if as much is not free within THALLUS_LEND, where a size counts in whole pages, up to a quarter more, and up to twice
 * that if it gets memory that was kept from an earlier allocation; ENOMEM if the system has none; EBUSY if another process that
 * shares this end has allocated on it; EINVAL for 0 bytes; ENOTCONN as above.
 */
struct thallus_memory *thallus_allocate(int fd, size_t bytes, void **address);

/*
 * Lends bytes of memory, from offset on, to the peer, and says in *handle where they are. They must stay as they are until the
 * loan is back. May be called again for the same bytes. 0, or -1: ENOBUFS if 1,024 loans of the connection are out;
 * EINVAL for what is not inside; EBUSY in a child made by fork(2).
 */
int thallus_lend(struct thallus_memory *memory, size_t offset, size_t bytes, struct thallus_handle *handle);

/*
 * How many loans of memory are not back yet. A handle that the peer never takes does not come back, nor does what it had taken
 * when it was killed: a child of its may still read that. So who waits for 0 must watch the connection, too. When that has ended,
 * call thallus_free(): it need not wait. In a child made by fork(2) it is 0: the child can't know of its parent's.
 */
int thallus_loans(struct thallus_memory *memory);

/*
 * Ends the use of memory by this program. It is used again, or goes back to the system, when all loans are back; at the latest
 * when both ends have closed the connection, and freed and given back what they have of it. NULL is ignored.
 */
void thallus_free(struct thallus_memory *memory);

/*
 * Takes a loan of the peer's. Address and size go to *address and *bytes; they stay until thallus_return(), also if
 * the connection is closed meanwhile. NULL: EPERM if the peer is not trusted, for it could change what has been
 * checked (use thallus_pull()); EINVAL if there is no such loan, or it has been taken; EOPNOTSUPP if the
 * connection never was over shared memory; ENOTCONN as above.
 */
struct thallus_loan *thallus_borrow(int fd, const struct thallus_handle *handle, const void **address, size_t *bytes);

/*
 * Gives a loan back. NULL is ignored.
 */
void thallus_return(struct thallus_loan *loan);

/*
 * Takes a loan of the peer's, copies it to the buffers of target, and gives it back. Returns its size in bytes, or -1:
 * EMSGSIZE if the buffers are too small, in which case it is not taken; EINVAL also for what readv(2) refuses; otherwise
 * as for thallus_borrow(), but for any peer. With count 0 nothing is copied: that gives a loan back unread.
 */
ssize_t thallus_pull(int fd, const struct thallus_handle *handle, const struct iovec *target, int count);

/*
 * Gives memory of this end that is kept for later allocations, up to 32 MiB while nothing is lent, back to the system. Where nothing
 * was ever allocated there is nothing to do. close(2) does the same, and from then on nothing is kept. 0, or -1: EOPNOTSUPP if the
 * connection never was over shared memory; ENOTCONN as above.
 */
int thallus_trim(int fd);

/* The functions above, as thallus_find() finds them. */
struct thallus_functions {
    unsigned (*api)(void);
    int (*status)(int, struct thallus_status *);
    struct thallus_memory *(*allocate)(int, size_t, void **);
    int (*lend)(struct thallus_memory *, size_t, size_t, struct thallus_handle *);
    int (*loans)(struct thallus_memory *);
    void (*free)(struct thallus_memory *);
    struct thallus_loan *(*borrow)(int, const struct thallus_handle *, const void **, size_t *);
    void (*give_back)(struct thallus_loan *);
    ssize_t (*pull)(int, const struct thallus_handle *, const struct iovec *, int);
    int (*trim)(int);
};

/* 0 if the library is there and has all that this header knows, else -1. */
static inline int thallus_find(struct thallus_functions *functions) {
    static const char *const names[] = {
        "thallus_api",  "thallus_status", "thallus_allocate", "thallus_lend", "thallus_loans",
        "thallus_free", "thallus_borrow", "thallus_return",   "thallus_pull", "thallus_trim",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *const function = dlsym(RTLD_DEFAULT, names[i]);
        if (!function)
            return -1;
        memcpy((unsigned char *)functions + i * sizeof function, &function, sizeof function);
    }
    return 0;
}

#ifdef __cplusplus
}
#endif

#endif
