//! An installation of the command in a folder of its own, with a library that shows that it was loaded.

#![allow(dead_code, reason = "each test uses a part of this")]

pub(crate) mod doctor;

use std::fs::{Permissions, create_dir_all, hard_link, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Preloaded, it says so on standard error and leaves the program alone.
const LOUD_LIBRARY: &str = r#"
#include <unistd.h>
__attribute__((constructor)) static void loaded(void) { (void)!write(2, MARK, sizeof MARK - 1); }
"#;

/// What the installed library writes.
pub(crate) const LOADED: &str = "[library loaded]";

/// A folder with `bin/thallus` and more.
pub(crate) struct Installation {
    folder: TempDir,
}

impl Installation {
    /// The command alone.
    pub(crate) fn without_library() -> Self {
        // Beside the build, so that the command can be linked instead of copied.
        Self::in_folder(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    /// The command, and the library at `library` relative to its folder.
    pub(crate) fn with_library(library: &str) -> Self {
        let installation = Self::without_library();
        installation.add_library(library);
        installation
    }

    /// The command in `bin` in `folder`.
    pub(crate) fn in_folder(folder: TempDir) -> Self {
        create_dir_all(folder.path().join("bin")).unwrap();
        hard_link(env!("CARGO_BIN_EXE_thallus"), folder.path().join("bin/thallus")).unwrap();
        Self { folder }
    }

    /// The command where it already is.
    pub(crate) fn at(folder: TempDir) -> Self {
        Self { folder }
    }

    /// Adds a library that writes [`LOADED`].
    pub(crate) fn add_library(&self, path: &str) -> PathBuf {
        self.add_marking_library(path, LOADED)
    }

    /// Adds a library that writes `mark` when it is loaded.
    pub(crate) fn add_marking_library(&self, path: &str, mark: &str) -> PathBuf {
        let define = format!("-DMARK=\"{mark}\"");
        self.compile(path, LOUD_LIBRARY, &["-shared", "-fPIC", &define])
    }

    /// Compiles a C program.
    pub(crate) fn compile(&self, path: &str, source: &str, options: &[&str]) -> PathBuf {
        let (source_file, output) = (self.path("source.c"), self.path(path));
        create_dir_all(output.parent().unwrap()).unwrap();
        write(&source_file, source).unwrap();
        let compiler = Command::new("gcc").args(options).arg("-o").arg(&output).arg(&source_file).output();
        let compiler = compiler.expect("gcc must be installed");
        assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
        output
    }

    /// Adds an executable script.
    pub(crate) fn add_script(&self, path: &str, text: &str) -> PathBuf {
        let script = self.path(path);
        write(&script, text).unwrap();
        set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        script
    }

    /// A path in the folder.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// `thallus run`, from an environment without settings of ours.
    pub(crate) fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.path("bin/thallus"));
        command.arg("run").args(arguments);
        for (name, _) in std::env::vars_os() {
            if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("THALLUS") {
                command.env_remove(name);
            }
        }
        command
    }

    /// The output of `thallus run -- program`.
    pub(crate) fn run_program(&self, program: &Path) -> Outcome {
        outcome(self.run(&["--"]).arg(program))
    }
}

/// What a command did.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Its exit status; `None` if a signal ended it.
    pub(crate) status: Option<i32>,
    /// Its standard output.
    pub(crate) output: String,
    /// Its standard error.
    pub(crate) errors: String,
}

/// Runs a command to its end.
pub(crate) fn outcome(command: &mut Command) -> Outcome {
    let Output { status, stdout, stderr } = command.output().unwrap();
    Outcome {
        status: status.code(),
        output: String::from_utf8(stdout).unwrap(),
        errors: String::from_utf8(stderr).unwrap(),
    }
}
