//! Files for results, opened before anything is measured: it may take half an hour until there is something to write.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::Context;

pub(super) struct Output<'a>(Option<(&'a Path, File)>);

impl<'a> Output<'a> {
    /// # Errors
    /// The file can't be written. What it holds so far stays.
    pub(super) fn open(path: Option<&'a Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self(None)) };
        let file = File::options().append(true).create(true).open(path).with_context(failed(path))?;
        Ok(Self(Some((path, file))))
    }

    /// Replaces what is in the file, if there is one.
    ///
    /// # Errors
    /// Those of `text`, and of writing.
    pub(super) fn write(self, text: impl FnOnce() -> anyhow::Result<String>) -> anyhow::Result<()> {
        let Some((path, mut file)) = self.0 else { return Ok(()) };
        let text = text()?;
        // A pipe has no length.
        let _ = file.set_len(0);
        file.write_all(text.as_bytes()).with_context(failed(path))
    }
}

fn failed(path: &Path) -> impl FnOnce() -> String {
    move || format!("can't write {}", path.display())
}
