//! What can be learned from processes that hang, and how they are ended.

use std::fmt::Write;
use std::fs;
use std::process::Command;

/// The processes of a process group, oldest first.
pub fn group_members(group: u32) -> Vec<u32> {
    let mut members: Vec<u32> = processes().filter(|&pid| group_of(pid) == Some(group)).collect();
    members.sort_unstable();
    members
}

/// All processes that can be seen.
pub(super) fn processes() -> impl Iterator<Item = u32> {
    let listing = fs::read_dir("/proc").into_iter().flatten();
    listing.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

fn group_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which stands in parentheses: state, parent, group.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    (fields.next()? != "Z").then_some(())?;
    fields.nth(1)?.parse().ok()
}

/// Where every thread of a process stands: kernel stack, status, open files, and gdb's backtrace.
pub fn report(pid: u32) -> String {
    let mut text = format!("--- process {pid}\n");
    for file in ["cmdline", "wchan", "syscall", "stack"] {
        let content = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let content = String::from_utf8_lossy(&content).replace('\0', " ");
        let _ = writeln!(text, "{file}: {}", content.trim_end());
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    for line in status.lines().filter(|line| {
        ["State:", "Threads:", "SigPnd:", "ShdPnd:", "SigBlk:"].iter().any(|key| line.starts_with(key))
    }) {
        let _ = writeln!(text, "{line}");
    }
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
        let target = fs::read_link(entry.path()).unwrap_or_default();
        let _ = writeln!(text, "fd {} -> {}", entry.file_name().display(), target.display());
    }
    let backtrace = Command::new("gdb")
        .args([
            "-batch",
            "-nx",
            "-iex",
            "set debuginfod enabled off",
            "-ex",
            "set print frame-arguments none",
        ])
        .args(["-ex", "thread apply all backtrace 15"])
        .args(["-p", &pid.to_string()])
        .env_remove("LD_PRELOAD")
        .output();
    match backtrace {
        Ok(output) => text.push_str(&String::from_utf8_lossy(&output.stdout)),
        Err(error) => {
            let _ = writeln!(text, "no backtrace: gdb: {error}");
        }
    }
    text
}

/// Kills a process group that the caller started.
pub fn end_group(group: u32) {
    let group = i32::try_from(group).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(group) = group {
        // A group that is gone already is what was wanted.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}
