//! Files for results, opened before anything is measured: it may take half an hour until there is something to write.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

pub(super) struct Output<'a>(Option<(&'a Path, File)>);

impl<'a> Output<'a> {
    /// # Errors
    /// The file can't be written. What it holds so far stays.
    pub(super) fn open(path: Option<&'a Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self(None)) };
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).open(path).with_context(failed(path))?;
        Ok(Self(Some((path, file))))
    }

    /// Replaces what is in the file, if there is one.
    ///
    /// # Errors
    /// Those of `text`, and of writing. Where there is no room for it the file keeps what it holds, if its file system can tell before
    /// (fallocate(2)).
    pub(super) fn write(self, text: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<()> {
        let Some((path, mut file)) = self.0 else { return Ok(()) };
        let text = text()?;
        let (before, length) = (file.metadata().map_or(0, |file| file.len()), text.len() as u64);
        match fallocate(&file, FallocateFlags::empty(), 0, length) {
            Err(full @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                let _ = file.set_len(before);
                return Err(full).with_context(failed(path));
            }
            // A pipe has no blocks, nor a length.
            _ => file.write_all(text.as_bytes()).with_context(failed(path))?,
        }
        let _ = file.set_len(length);
        Ok(())
    }
}

fn failed(path: &Path) -> impl FnOnce() -> String {
    move || format!("can't write {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_there_is_replaced_whatever_its_length() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("results");
        for text in ["a result", "a longer result", "short"] {
            Output::open(Some(&path))?.write(|| Ok(text.to_owned()))?;
            assert_eq!(std::fs::read_to_string(&path)?, text);
        }
        Ok(())
    }
}
