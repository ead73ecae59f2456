//! The library's way to the unwinder, in this program's own place: panics are caught by it.

#![cfg(target_arch = "x86_64")]

#[path = "../../shim/src/unwind.rs"]
mod unwind;

use std::panic::catch_unwind;

struct Counts<'a>(&'a std::cell::Cell<u32>);

impl Drop for Counts<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn panics_unwind_by_what_is_found_when_the_first_one_comes() {
    assert!(!unwind::is_found());
    std::panic::set_hook(Box::new(|_| {}));
    for _ in 0..3 {
        let caught = catch_unwind(|| {
            let dropped = std::cell::Cell::new(0);
            // Landing pads, which resume.
            let inner = catch_unwind(std::panic::AssertUnwindSafe(|| {
                let _outer = Counts(&dropped);
                let _inner = Counts(&dropped);
                panic!("{}", dropped.get());
            }));
            assert_eq!(dropped.get(), 2);
            std::panic::resume_unwind(inner.expect_err("it panics"));
        });
        assert_eq!(caught.expect_err("it goes on").downcast_ref::<String>().map(String::as_str), Some("0"));
        assert!(unwind::is_found());
    }
    let _ = std::panic::take_hook();
    // Walks the stack.
    assert!(std::backtrace::Backtrace::force_capture().to_string().contains("unwinding"));
}
