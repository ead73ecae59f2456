//! Small programs that behaviours start with exec: `behaviour --helper NAME ARGUMENTS…`.

use super::peers;
use crate::calls::{self, Fd};

/// Runs the helper `name`.
///
/// # Panics
/// If there is no such helper, or a call of it fails.
pub fn run(name: &str, arguments: &[&str]) {
    let fd = |index: usize| -> Fd {
        let text = arguments.get(index).unwrap_or_else(|| panic!("helper {name} wants another argument"));
        text.parse().expect("a descriptor is a number")
    };
    match name {
        "echo" => echo(fd(0)),
        "ask" => peers::request_echoes(fd(0), 60, 3000),
        "accept" => accept(fd(0), fd(1)),
        "nothing" => {}
        "wait" => assert_eq!(calls::quietly(|| calls::read(fd(0), 1)), Ok(Vec::new())),
        _ => panic!("no helper is called {name}"),
    }
}

/// Sends back whatever comes, until the stream ends.
fn echo(fd: Fd) {
    let total = peers::echo(fd);
    // Standard output may be the connection itself.
    if fd > 2 {
        crate::say!("echoed {total} bytes");
    }
}

/// Takes `count` connections, one after the other, and echoes on each.
fn accept(listener: Fd, count: Fd) {
    calls::quietly(|| {
        for _ in 0..count {
            let fd = calls::accept4(listener, 0).expect("accept4");
            peers::echo(fd);
            calls::close(fd).expect("close");
        }
    });
}
