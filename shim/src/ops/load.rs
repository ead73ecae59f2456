//! Modules are loaded: those that look past whatever was preloaded get the hooks all the same. So does a program that opens
//! libc by its name, as Python's ctypes does.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};

use thallus_transport::reason::Reason;

use crate::ops::process;
use crate::{config, errno, log, symbols};

/// Whether the program is about to look for names in libc itself.
pub(crate) fn is_libc(file: &CStr) -> bool {
    let name = file.to_bytes().rsplit(|&byte| byte == b'/').next();
    name.is_some_and(|name| name.starts_with(b"libc.so"))
}

/// libc's names are about to be looked for in libc, by the program or for a module of its. All of [`crate::real`] is resolved.
pub(crate) fn before_passing_by() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.load(Ordering::Acquire) || !config::enabled() {
        return;
    }
    errno::keep(|| {
        if symbols::lead_to_hooks() {
            log::info!("libc's names lead to the hooks");
        } else {
            log::warn!("libc's names can't lead to the hooks: calls of modules may be unseen");
            process::leaves_sight(Reason::UnseenCalls);
        }
    });
    // Threads that come at the same time all do it: none may load before it is done.
    DONE.store(true, Ordering::Release);
}
