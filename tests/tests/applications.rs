//! Real programs under the library: their results, and how many of their connections left TCP.

mod applications {
    mod apache;
    mod calls;
    mod configuration;
    mod containers;
    mod curl;
    mod deepbind;
    mod exchange;
    mod handed_on;
    mod handlers;
    mod lending;
    mod locking;
    mod nginx;
    mod php;
    mod postgres;
    mod python;
    mod redis;
    mod services;
    mod ssh;
    mod wrapping;
}
