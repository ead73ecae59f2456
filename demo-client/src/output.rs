//! Where a result goes.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use arrow_array::RecordBatch;
use arrow_cast::display::FormatOptions;
use arrow_cast::pretty::pretty_format_batches_with_options;
use arrow_ipc::writer::FileWriter;
use arrow_schema::SchemaRef;
use tempfile::{NamedTempFile, TempPath};

use crate::interrupt::Interrupt;
use crate::parquet_file;
use crate::text::{Formatters, printable, readable};

/// Rows of a table on the terminal.
const PREVIEW: usize = 40;

pub(crate) struct Output {
    format: Format,
    /// For messages.
    name: String,
    place: Place,
    interrupt: Interrupt,
}

enum Format {
    Nothing,
    Table {
        schema: SchemaRef,
        batches: Vec<RecordBatch>,
        rows: usize,
        /// What stands for NULL.
        null: String,
    },
    /// With the schema as long as nothing was written, the header neither.
    Csv(Box<arrow_csv::Writer<Box<dyn Write>>>, Option<SchemaRef>),
    Arrow(Box<FileWriter<BufWriter<File>>>),
    // Writes its buffers in large pieces.
    Parquet(Box<parquet_file::Writer>),
}

/// A file is complete or not there: it gets its name at the end, once it is on the disk.
enum Place {
    /// Standard output, or something that is no regular file, such as a pipe or a device.
    Direct,
    File(TempPath, PathBuf, File),
}

impl Output {
    /// # Errors
    ///
    /// An unknown ending; a file that can't be made; a type that the format does not have.
    pub(crate) fn open(
        path: Option<&Path>,
        nothing: bool,
        null: &str,
        schema: &SchemaRef,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let interrupt = interrupt.clone();
        let Some(path) = path.filter(|path| *path != Path::new("-")) else {
            let format = if path.is_none() && nothing {
                Format::Nothing
            } else if path.is_none() && io::stdout().is_terminal() {
                let null = null.to_owned();
                Format::Table { schema: schema.clone(), batches: Vec::new(), rows: 0, null }
            } else {
                let writer = csv(Box::new(io::stdout()), schema, null);
                Format::Csv(writer.context("can't write standard output")?, Some(schema.clone()))
            };
            let name = "standard output".to_owned();
            return Ok(Self { format, name, place: Place::Direct, interrupt });
        };
        let name = path.display().to_string();
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if !matches!(extension.as_str(), "parquet" | "arrow" | "csv") {
            bail!("{name}: the file must end in .parquet, .arrow or .csv");
        }
        let (file, place) = create(path, &interrupt).with_context(|| format!("can't create {name}"))?;
        let format = match extension.as_str() {
            "parquet" => {
                parquet_file::Writer::new(file, schema).map(|writer| Format::Parquet(Box::new(writer)))
            }
            "arrow" => FileWriter::try_new(BufWriter::new(file), schema)
                .map_err(anyhow::Error::from)
                .map(|writer| Format::Arrow(Box::new(writer))),
            _ => csv(Box::new(BufWriter::new(file)), schema, null)
                .map(|writer| Format::Csv(writer, Some(schema.clone()))),
        };
        let format = format.with_context(|| format!("can't write {name}"))?;
        Ok(Self { format, name, place, interrupt })
    }

    pub(crate) fn write(&mut self, batch: &RecordBatch) -> Result<()> {
        let written = match &mut self.format {
            Format::Nothing => Ok(()),
            Format::Table { batches, rows, .. } => {
                let wanted = batch.num_rows().min(PREVIEW - *rows);
                if wanted > 0 {
                    batches.push(batch.slice(0, wanted));
                    *rows += wanted;
                }
                Ok(())
            }
            Format::Csv(writer, header) => {
                *header = None;
                readable(batch).and_then(|batch| writer.write(&batch)).map_err(anyhow::Error::from)
            }
            Format::Arrow(writer) => writer.write(batch).map_err(Into::into),
            Format::Parquet(writer) => writer.write(batch),
        };
        written.with_context(|| format!("can't write {}", self.name))
    }

    /// Completes the file, and gives it its name.
    pub(crate) fn finish(self, rows: u64) -> Result<()> {
        let written = match self.format {
            Format::Nothing => Ok(()),
            Format::Table { schema, batches, null, .. } => show(schema, &batches, rows, &null),
            Format::Csv(mut writer, header) => header
                .map_or(Ok(()), |schema| writer.write(&RecordBatch::new_empty(schema)))
                .map_err(anyhow::Error::from)
                .and_then(|()| Ok(writer.into_inner().flush()?)),
            Format::Arrow(writer) => writer
                .into_inner()
                .map_err(anyhow::Error::from)
                .and_then(|file| file.into_inner().map_err(|error| error.into_error().into()))
                .map(drop),
            Format::Parquet(writer) => writer.close(),
        };
        written.with_context(|| format!("can't write {}", self.name))?;
        match self.place {
            Place::Direct => Ok(()),
            Place::File(temporary, path, file) => {
                // Some errors show only then: of quotas, of disks, of file systems elsewhere.
                let synced = file.sync_all().map_err(anyhow::Error::from);
                let mut unfinished = self.interrupt.unfinished();
                let named = synced.and_then(|()| Ok(temporary.persist(path)?));
                *unfinished = None;
                named.with_context(|| format!("can't write {}", self.name))
            }
        }
    }
}

/// Nested types are looked for first: the writer looks after the header, and only if there are rows.
fn csv(
    writer: Box<dyn Write>,
    schema: &SchemaRef,
    null: &str,
) -> Result<Box<arrow_csv::Writer<Box<dyn Write>>>> {
    if let Some(field) = schema.fields().iter().find(|field| field.data_type().is_nested()) {
        bail!("column {:?}: CSV has no {}", field.name(), field.data_type());
    }
    let builder = arrow_csv::WriterBuilder::new().with_header(true).with_null(null.to_owned());
    Ok(Box::new(builder.build(writer)))
}

fn create(path: &Path, interrupt: &Interrupt) -> Result<(File, Place)> {
    // What a link points to is replaced, not the link.
    let path = match path.metadata() {
        Ok(metadata) if !metadata.is_file() => {
            return Ok((OpenOptions::new().write(true).open(path)?, Place::Direct));
        }
        Ok(_) => path.canonicalize()?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => pointed_to(path),
        Err(error) => return Err(error.into()),
    };
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let existing = path.metadata().ok();
    let mode = existing.as_ref().map_or(0o666, |existing| existing.mode() & 0o700);
    let mut unfinished = interrupt.unfinished();
    let temporary = tempfile::Builder::new()
        .prefix(".demo-client-")
        .permissions(Permissions::from_mode(mode))
        .tempfile_in(folder)
        .map(NamedTempFile::into_parts);
    let (file, temporary) = temporary?;
    *unfinished = Some(temporary.to_path_buf());
    drop(unfinished);
    if let Some(existing) = existing {
        adopt(&file, &existing)?;
    }
    let same = file.try_clone()?;
    Ok((file, Place::File(temporary, path, same)))
}

/// Where links lead to a file that is not there yet.
fn pointed_to(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    while let Ok(link) = path.read_link() {
        path = path.parent().unwrap_or(Path::new("")).join(link);
    }
    path
}

/// Gives a file the mode of the one that it replaces.
fn adopt(file: &File, existing: &Metadata) -> io::Result<()> {
    let group = existing.gid();
    let same_group = file.metadata()?.gid() == group || fchown(file, None, Some(group)).is_ok();
    // Another group must not get what that one had.
    let mode = existing.mode() & if same_group { 0o777 } else { 0o707 };
    file.set_permissions(Permissions::from_mode(mode))
}

fn show(schema: SchemaRef, batches: &[RecordBatch], rows: u64, null: &str) -> Result<()> {
    let empty = [RecordBatch::new_empty(schema)];
    let batches = if batches.is_empty() { &empty } else { batches };
    let options = FormatOptions::default().with_null(null).with_formatter_factory(Some(&Formatters));
    let table = pretty_format_batches_with_options(batches, &options)?.to_string();
    let mut output = io::stdout().lock();
    writeln!(output, "{}", printable(&table))?;
    if rows > PREVIEW as u64 {
        writeln!(output, "{rows} rows, the first {PREVIEW} of which are shown")?;
    } else {
        writeln!(output, "{rows} rows")?;
    }
    Ok(())
}
