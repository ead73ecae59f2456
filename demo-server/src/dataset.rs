//! DuckDB over the files of one folder.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use duckdb::{Config, Connection};

use crate::interrupt::Interruptible;
use crate::sql;

/// Names that DuckDB has for databases of its own.
const RESERVED: &[&str] = &["memory", "system", "temp"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Parquet,
    Csv,
    DuckDb,
}

/// Size, inode and times of change of files, in nanoseconds; none of one that is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version(Vec<Option<[i128; 4]>>);

impl Version {
    pub(crate) fn of(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Self {
        let time =
            |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        let of = |path: &Path| {
            let file = path.metadata().ok()?;
            let (modified, changed) =
                (time(file.mtime(), file.mtime_nsec()), time(file.ctime(), file.ctime_nsec()));
            Some([file.size().into(), file.ino().into(), modified, changed])
        };
        Self(paths.into_iter().map(|path| of(path.as_ref())).collect())
    }
}

/// A database in memory whose views read the files. Its settings are final.
pub(crate) struct Dataset {
    name: String,
    paths: Vec<PathBuf>,
    database: Mutex<Option<Connection>>,
}

impl std::fmt::Debug for Dataset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dataset").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Dataset {
    /// # Errors
    ///
    /// No such folder; no data file in it; files of the same name; a link that leads out of it; a file that DuckDB can't
    /// read; a wrong size of memory.
    pub(crate) fn open(folder: &Path, memory: Option<&str>) -> Result<Self> {
        let show = folder.display();
        let folder = folder.canonicalize().with_context(|| format!("can't use the dataset {show}"))?;
        let files = files(&folder).with_context(|| format!("can't use the dataset {show}"))?;
        ensure!(!files.is_empty(), "the dataset {show} has no .parquet, .csv or .duckdb file");

        let mut config = Config::default()
            .enable_autoload_extension(false)?
            .with("allow_community_extensions", "false")?
            .with("allow_persistent_secrets", "false")?
            .with("temp_directory", "")?;
        if let Some(memory) = memory {
            config = config.with("max_memory", memory)?;
        }
        let database = Connection::open_in_memory_with_flags(config).context("DuckDB")?;
        name_time_zone(&database).context("DuckDB's time zone")?;
        for (name, (path, kind)) in &files {
            add(&database, name, path, *kind)
                .map_err(told)
                .with_context(|| format!("DuckDB can't read {}", path.display()))?;
        }
        lock(&database, files.values().map(|(path, _)| path)).context("DuckDB's settings")?;
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        let paths = files.into_values().map(|(path, _)| path).collect();
        Ok(Self { name, paths, database: Mutex::new(Some(database)) })
    }

    /// A connection of its own for a query of `dataset`, which is the folder's name or empty.
    ///
    /// # Errors
    ///
    /// The message for the client.
    pub(crate) fn connect(&self, dataset: &str) -> Result<Interruptible, String> {
        if !dataset.is_empty() && dataset != self.name {
            return Err(format!("There is no dataset \"{dataset}\"; this server has \"{}\"", self.name));
        }
        match &*self.database() {
            Some(database) => {
                database.try_clone().map(Interruptible::from).map_err(|error| sql::message(&error))
            }
            None => Err("The server is closing".to_owned()),
        }
    }

    /// By which a change of the files shows.
    pub(crate) fn version(&self) -> Version {
        Version::of(&self.paths)
    }

    /// Ends DuckDB, once its last connection is dropped.
    pub(crate) fn close(&self) {
        drop(self.database().take());
    }

    fn database(&self) -> MutexGuard<'_, Option<Connection>> {
        self.database.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the system has no time zone (`TZ` may be empty) DuckDB gives its times in UTC, but Arrow a name that no reader knows.
fn name_time_zone(database: &Connection) -> Result<()> {
    let unknown = "FROM duckdb_settings() WHERE name = 'TimeZone' AND value = 'Etc/Unknown'";
    if database.prepare(unknown)?.exists([])? {
        database.execute_batch("SET GLOBAL TimeZone = 'UTC'")?;
    }
    Ok(())
}

/// Data files by their view's name.
fn files(folder: &Path) -> Result<HashMap<String, (PathBuf, Kind)>> {
    let mut files = HashMap::new();
    for entry in folder.read_dir()? {
        let path = entry?.path();
        let extension = path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let kind = match extension.as_str() {
            "parquet" => Kind::Parquet,
            "csv" => Kind::Csv,
            "duckdb" => Kind::DuckDb,
            _ => continue,
        };
        if !path.is_file() {
            continue;
        }
        let target = path.canonicalize()?;
        ensure!(
            target.starts_with(folder),
            "{} leads out of the folder, to {}",
            path.display(),
            target.display()
        );
        let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) else {
            bail!("{}: the name is not UTF-8", path.display());
        };
        // In which DuckDB would see a pattern.
        ensure!(
            !path.to_string_lossy().contains(['*', '?', '[']),
            "{}: a name with * ? or [",
            path.display()
        );
        let name = stem.to_lowercase();
        ensure!(!RESERVED.contains(&name.as_str()), "{}: the name {stem:?} is DuckDB's own", path.display());
        if let Some((other, _)) = files.insert(name, (path.clone(), kind)) {
            bail!("{} and {} would have the same name", other.display(), path.display());
        }
    }
    Ok(files)
}

/// Makes the view of a file. A DuckDB file is a database of that name, and also a view if it has a single table.
fn add(database: &Connection, name: &str, path: &Path, kind: Kind) -> Result<()> {
    let path = literal(path.to_str().context("the path is not UTF-8")?);
    let view = identifier(name);
    let source = match kind {
        // A folder above that is called `column=value` says nothing of the file.
        Kind::Parquet => format!("read_parquet({path}, hive_partitioning = false)"),
        Kind::Csv => format!("read_csv({path}, hive_partitioning = false)"),
        Kind::DuckDb => {
            database.execute_batch(&format!("ATTACH {path} AS {view} (READ_ONLY)"))?;
            let mut tables = database.prepare(
                "SELECT table_name FROM duckdb_tables() WHERE database_name = ? AND schema_name = 'main'",
            )?;
            let tables = tables.query_map([name], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
            let [table] = &tables[..] else { return Ok(()) };
            format!("{view}.main.{}", identifier(table))
        }
    };
    database.execute_batch(&format!("CREATE VIEW memory.main.{view} AS FROM {source}"))?;
    Ok(())
}

/// From here on nothing but the files of the dataset can be opened, and no setting changed.
fn lock<'a>(database: &Connection, paths: impl Iterator<Item = &'a PathBuf>) -> Result<()> {
    let paths: Vec<_> = paths.map(|path| literal(&path.to_string_lossy())).collect();
    database.execute_batch(&format!(
        "SET allowed_paths = [{}]; SET enable_external_access = false; SET lock_configuration = true",
        paths.join(", ")
    ))?;
    Ok(())
}

/// What DuckDB says, without the number that its crate appends.
fn told(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(error) => anyhow!(sql::message(error)),
        None => error,
    }
}

fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
