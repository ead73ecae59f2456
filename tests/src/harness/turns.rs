//! Keeps tests that start many processes from running all at once.

use std::sync::{Condvar, Mutex, PoisonError};

/// Tests of one executable that run at the same time; both sides of a pair spin while they wait.
const AT_ONCE: usize = 2;

static FREE: Mutex<usize> = Mutex::new(AT_ONCE);
static FREED: Condvar = Condvar::new();

/// Leave to run; the next test gets it when this is dropped.
#[derive(Debug)]
pub struct Turn(());

/// Waits until fewer than two other tests run.
pub fn turn() -> Turn {
    let free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut free = FREED.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
    *free -= 1;
    Turn(())
}

impl Drop for Turn {
    fn drop(&mut self) {
        *FREE.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        FREED.notify_one();
    }
}
