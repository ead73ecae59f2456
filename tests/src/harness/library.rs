//! Finds the library under test.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const NAME: &str = "libthallus_shim.so";

/// `THALLUS_LIBRARY` if it is set, else the library beside the folder of the running test.
///
/// # Errors
/// If there is none. A test then fails: without the library it would prove nothing.
pub fn library() -> Result<PathBuf> {
    let path = match std::env::var_os("THALLUS_LIBRARY") {
        Some(path) => PathBuf::from(path),
        None => {
            let test = std::env::current_exe().context("this test's own path")?;
            // target/PROFILE/deps/TEST
            let profile =
                test.parent().and_then(Path::parent).context("the test runs from a target folder")?;
            profile.join(NAME)
        }
    };
    match path.canonicalize() {
        Ok(path) => Ok(path),
        Err(error) => bail!(
            "{} cannot be used ({error}): build it with `cargo build -p thallus-shim` in the same profile, or \
             set THALLUS_LIBRARY to its path",
            path.display()
        ),
    }
}
