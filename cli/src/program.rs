//! Finds the program that a command names, and says whether a library can be preloaded into it.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat, getxattr};

use crate::elf::{Abi, Image, read_up_to};

/// What execvp(3) searches if there is no `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// `#!` lines that Linux follows before it gives up with `ELOOP`.
const INTERPRETER_DEPTH: usize = 5;

/// Bytes of a file in which Linux looks for the `#!` line (`BINPRM_BUF_SIZE`).
const SHEBANG_BYTES: usize = 256;

const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

/// Why a command names no program that can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// There is no such file.
    NotFound,
    /// There is one, but it is a folder or lacks permission to execute.
    NotExecutable,
}

/// Finds `name` as execvp(3) does: a name with a slash is a path, others are searched in `path`.
pub(crate) fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, Missing> {
    if name.as_bytes().contains(&b'/') {
        return executable(Path::new(name)).map(|()| PathBuf::from(name));
    }
    if name.is_empty() {
        return Err(Missing::NotFound);
    }
    let mut outcome = Missing::NotFound;
    for folder in path.unwrap_or(OsStr::new(DEFAULT_PATH)).as_bytes().split(|&byte| byte == b':') {
        // An empty entry is the current folder.
        let folder = if folder.is_empty() { Path::new(".") } else { Path::new(OsStr::from_bytes(folder)) };
        let candidate = folder.join(name);
        match executable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(Missing::NotExecutable) => outcome = Missing::NotExecutable,
            Err(Missing::NotFound) => {}
        }
    }
    Err(outcome)
}

fn executable(path: &Path) -> Result<(), Missing> {
    let metadata = path.metadata().map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Missing::NotExecutable,
        _ => Missing::NotFound,
    })?;
    // exec asks for the effective user, access(2) alone for the real one.
    let allowed = metadata.is_file() && accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).is_ok();
    if allowed { Ok(()) } else { Err(Missing::NotExecutable) }
}

/// A program into which the loader will not, or cannot, preload the library.
#[derive(Debug)]
pub(crate) struct Obstacle {
    /// The file named by the command.
    command: PathBuf,
    /// The file that the kernel would load: the command itself, or the interpreter of a script.
    program: PathBuf,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    Static,
    SetUserId,
    SetGroupId,
    Capabilities,
    OtherMachine { program: Abi, library: Abi },
    Musl { interpreter: PathBuf },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} can't be accelerated: ", self.command.display())?;
        if self.program == self.command {
            f.write_str("it ")?;
        } else {
            write!(f, "its interpreter {} ", self.program.display())?;
        }
        write!(f, "{}. Without `thallus run` it works over TCP as always.", self.cause)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const IGNORED: &str = "and the dynamic loader ignores LD_PRELOAD for programs that change privileges";
        match self {
            Self::Static => {
                f.write_str("is statically linked, so it has no dynamic loader that could preload a library")
            }
            Self::SetUserId => write!(f, "is set-user-ID, {IGNORED}"),
            Self::SetGroupId => write!(f, "is set-group-ID, {IGNORED}"),
            Self::Capabilities => write!(f, "has file capabilities, {IGNORED}"),
            Self::OtherMachine { program, library } => {
                write!(f, "is a {program} program, and the library is {library}")
            }
            Self::Musl { interpreter } => {
                write!(f, "is linked against musl ({}), and the library hooks glibc", interpreter.display())
            }
        }
    }
}

/// Looks at the program behind `command`, through `#!` lines, for whatever keeps a library of `library`'s
/// kind out of it. A file that can't be read or is of an unknown kind is left for exec to judge.
pub(crate) fn obstacle(command: &Path, path: Option<&OsStr>, library: Abi) -> Option<Obstacle> {
    let program = behind(command, path)?;
    let cause = match File::open(&program) {
        Ok(file) => image_cause(&program, &file, library)?,
        // Programs may be executable without being readable; their permission bits still show.
        Err(_) => privileges(&program, &program.metadata().ok()?)?,
    };
    Some(Obstacle { command: command.to_owned(), program, cause })
}

/// The file that the kernel would load for `command`, whether it is there or not: itself, or the interpreter that its `#!` line leads
/// to. `None` if there are more such lines than Linux follows.
pub(crate) fn behind(command: &Path, path: Option<&OsStr>) -> Option<PathBuf> {
    let mut program = command.to_owned();
    for _ in 0..INTERPRETER_DEPTH {
        match File::open(&program).ok().and_then(|file| script_interpreter(&file, path)) {
            Some(interpreter) => program = interpreter,
            None => return Some(program),
        }
    }
    None
}

fn image_cause(program: &Path, file: &File, library: Abi) -> Option<Cause> {
    let image = Image::read(file).ok()??;
    if let Some(cause) = privileges(program, &file.metadata().ok()?) {
        return Some(cause);
    }
    if image.abi != library {
        return Some(Cause::OtherMachine { program: image.abi, library });
    }
    match &image.interpreter {
        None if is_dynamic_loader(program) => None,
        None => Some(Cause::Static),
        Some(interpreter) if image.is_musl() => Some(Cause::Musl { interpreter: interpreter.clone() }),
        Some(_) => None,
    }
}

/// Whether `program` would change privileges, so that the loader starts it in secure mode (ld.so(8)).
/// Said of any such file, although secure mode is not entered if the privileges are the caller's own.
fn privileges(program: &Path, metadata: &Metadata) -> Option<Cause> {
    let mode = metadata.mode();
    if mode & SETUID != 0 {
        return Some(Cause::SetUserId);
    }
    // Without the group's execute bit, set-group-ID once meant mandatory locking; exec ignores it.
    if mode & SETGID != 0 && mode & GROUP_EXECUTE != 0 {
        return Some(Cause::SetGroupId);
    }
    let capabilities = getxattr(program, "security.capability", &mut [0u8; 64]);
    capabilities.is_ok().then_some(Cause::Capabilities)
}

/// The loader itself has no interpreter and yet preloads, into the program that is its argument.
fn is_dynamic_loader(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default().as_bytes();
    name.starts_with(b"ld-linux") || name == b"ld.so"
}

/// The interpreter of a script: the program of its `#!` line, or what env(1) will start there.
fn script_interpreter(file: &File, path: Option<&OsStr>) -> Option<PathBuf> {
    let start = read_up_to(file, 0, SHEBANG_BYTES).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(|byte| matches!(byte, b' ' | b'\t' | b'\r')).filter(|word| !word.is_empty());
    let interpreter = PathBuf::from(OsString::from(OsStr::from_bytes(words.next()?)));
    if interpreter.file_name() == Some(OsStr::new("env")) {
        // Options, such as -S, and settings come before the program.
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
        if let Some(found) = name.and_then(|name| find(OsStr::from_bytes(name), path).ok()) {
            return Some(found);
        }
    }
    Some(interpreter)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::PermissionsExt;

    fn script(folder: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn own_abi() -> Abi {
        Image::read(&File::open("/proc/self/exe").unwrap()).unwrap().unwrap().abi
    }

    #[test]
    fn a_name_is_searched_past_what_is_not_executable() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        script(first.path(), "tool", "", 0o644);
        std::fs::create_dir(first.path().join("folder")).unwrap();
        let wanted = script(second.path(), "tool", "", 0o755);
        let path = OsString::from(format!("{}:{}", first.path().display(), second.path().display()));

        assert_eq!(find(OsStr::new("tool"), Some(&path)), Ok(wanted));
        assert_eq!(find(OsStr::new("folder"), Some(&path)), Err(Missing::NotExecutable));
        assert_eq!(find(OsStr::new("nothing"), Some(&path)), Err(Missing::NotFound));
        assert_eq!(find(OsStr::new(""), Some(&path)), Err(Missing::NotFound));
        assert!(find(OsStr::new("sh"), None).is_ok());
    }

    #[test]
    fn interpreters_are_followed_also_through_env() {
        let folder = tempfile::tempdir().unwrap();
        let path = OsString::from(folder.path());
        let tool = script(folder.path(), "tool", "#!/bin/sh -e\n", 0o755);
        let follow = |text: &str| {
            let file = script(folder.path(), "script", text, 0o755);
            script_interpreter(&File::open(file).unwrap(), Some(&path))
        };
        assert_eq!(follow("#! /bin/sh -e\n"), Some("/bin/sh".into()));
        assert_eq!(follow("#!/usr/bin/env tool\nmore"), Some(tool.clone()));
        assert_eq!(follow("#!/usr/bin/env -S A=b tool -x\n"), Some(tool));
        assert_eq!(follow("#!/usr/bin/env nothing\n"), Some("/usr/bin/env".into()));
        assert_eq!(follow("#!\n"), None);
        assert_eq!(follow("echo\n"), None);
    }

    #[test]
    fn scripts_that_name_each_other_in_a_circle_are_left_to_exec() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loop");
        let path = script(folder.path(), "loop", &format!("#!{}\n", path.display()), 0o755);
        assert!(obstacle(&path, None, own_abi()).is_none());
        assert_eq!(behind(&path, None), None);
    }

    #[test]
    fn a_set_user_id_bit_on_a_script_means_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = script(folder.path(), "script", "#!/bin/sh\n", 0o4755);
        assert!(obstacle(&path, None, own_abi()).is_none());
    }

    #[test]
    fn a_program_for_another_processor_is_named_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("foreign");
        let mut image = std::fs::read("/proc/self/exe").unwrap();
        image[18..20].copy_from_slice(&243u16.to_ne_bytes());
        std::fs::write(&path, image).unwrap();
        let message = obstacle(&path, None, own_abi()).unwrap().to_string();
        assert!(message.contains("it is a 64-bit RISCV program, and the library is 64-bit"), "{message}");
    }
}
