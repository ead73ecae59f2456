//! `libthallus_shim.so`: hooks on libc's socket calls of a preloaded program, nothing else.
//!
//! [`abi`] holds the functions that the program calls instead of libc's; each only forwards. [`table`] knows which file
//! descriptors are TCP connections. [`ops`] decides. Everything about bytes is `thallus-transport`'s.

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("some hooks are in assembly, for x86-64 and AArch64");

#[allow(unreachable_pub, reason = "the hooks are exported by name")]
#[allow(
    clippy::multiple_unsafe_ops_per_block,
    reason = "a hook hands the program's own arguments on twice, to us and to libc, by one and the same promise"
)]
mod abi;
mod cancel;
mod config;
mod errno;
mod log;
mod ops;
mod real;
mod reserve;
mod stats;
mod symbols;
mod table;
mod unwind;
mod version;
