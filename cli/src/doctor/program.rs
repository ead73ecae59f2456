//! The program that the settings are to be for.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use serde::Serialize;

use super::sheet::Sheet;
use super::{Problem, yes_or_no};
use crate::program::{self, Missing};
use crate::run::{Failure, usable_library};

/// A program, as `thallus run` would find it.
#[derive(Debug, Serialize)]
pub(super) struct Program {
    /// As it was asked for.
    pub(super) name: String,
    /// Its executable file, behind `#!` lines and symbolic links; null if there is none.
    path: Option<String>,
    /// Whether the library can be preloaded into it, as far as its file tells.
    pub(super) usable: bool,
}

/// Finds a program. With the path by which a configuration knows it; of one that is not there, as it was given.
pub(super) fn look(name: &OsStr, problems: &mut Vec<Problem>) -> (Program, OsString) {
    let mut complain = |text: String, remedy: &str| problems.push(Problem::new("program", text, remedy));
    let search = env::var_os("PATH");
    let (path, usable) = match find(name, search.as_deref()) {
        Err(failure) => {
            complain(failure.to_string(), "name a program that is there, as to thallus run");
            (None, false)
        }
        Ok((command, path)) => {
            // Without a library there is a problem already.
            let library = usable_library().ok();
            let obstacle = library.and_then(|(_, abi)| program::obstacle(&command, search.as_deref(), abi));
            if let Some(obstacle) = &obstacle {
                complain(obstacle.to_string(), "see docs/limitations.md, programs that can't be preloaded");
            }
            (Some(path), obstacle.is_none())
        }
    };
    let shown = path.as_ref().map(|path| path.to_string_lossy().into_owned());
    let known_as = path.map_or_else(|| name.to_owned(), PathBuf::into_os_string);
    (Program { name: name.to_string_lossy().into_owned(), path: shown, usable }, known_as)
}

/// The file that is to be started, and the one that is executed then.
fn find(name: &OsStr, search: Option<&OsStr>) -> Result<(PathBuf, PathBuf), Failure> {
    let command = program::find(name, search).map_err(|missing| match missing {
        Missing::NotFound => Failure::NotFound(name.into()),
        Missing::NotExecutable => Failure::NotExecutable(name.into()),
    })?;
    let behind = program::behind(&command, search).and_then(|path| path.canonicalize().ok());
    match behind {
        Some(path) => Ok((command, path)),
        None => Err(Failure::NoInterpreter(command)),
    }
}

impl Program {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        sheet.fact("executable", self.path.as_deref().unwrap_or("none"));
        sheet.fact("library can be preloaded", yes_or_no(self.usable));
    }
}
