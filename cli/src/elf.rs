//! The few facts of an ELF file that decide whether the dynamic loader will preload a library into it.
//!
//! Reads the file header, the program header table and the interpreter's path, never the whole file:
//! programs of 100 MiB are common. Layout: elf(5).

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use goblin::container::{Container, Ctx, Endian};
use goblin::elf::Elf;
use goblin::elf::header::machine_to_str;
use goblin::elf::program_header::{PT_INTERP, ProgramHeader};

const MAGIC: &[u8] = b"\x7fELF";

/// Size of a 64-bit file header; the 32-bit one is shorter.
const HEADER_BYTES: usize = 64;

/// Longest interpreter path that Linux accepts (`PATH_MAX`), in bytes.
const INTERPRETER_BYTES: u64 = 4096;

/// Word size, byte order and processor: a library can only be loaded into a program with the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Abi {
    wide: bool,
    little_endian: bool,
    machine: u16,
}

impl fmt::Display for Abi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = if self.wide { 64 } else { 32 };
        let order = if self.little_endian { "" } else { " big-endian" };
        write!(f, "{bits}-bit{order} {}", machine_to_str(self.machine))
    }
}

/// The version that the library at `bytes` bears as a note (`shim/src/version.rs`).
pub(crate) fn version(bytes: &[u8]) -> Option<String> {
    let image = Elf::parse(bytes).ok()?;
    let notes = image.iter_note_headers(bytes)?;
    let note = notes.flatten().find(|note| note.name == "Thallus")?;
    String::from_utf8(note.desc.to_vec()).ok()
}

/// What an ELF file says about how it is started.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) abi: Abi,
    /// The dynamic loader it asks for (`PT_INTERP`); a static program has none.
    pub(crate) interpreter: Option<PathBuf>,
}

impl Image {
    /// Reads the headers of `file`. `None` if it is no ELF file, or one that the kernel would not run.
    pub(crate) fn read(file: &File) -> io::Result<Option<Self>> {
        let start = read_up_to(file, 0, HEADER_BYTES)?;
        if !start.starts_with(MAGIC) {
            return Ok(None);
        }
        let Ok(header) = Elf::parse_header(&start) else { return Ok(None) };
        let (Ok(container), Ok(endian)) = (header.container(), header.endianness()) else {
            return Ok(None);
        };

        let context = Ctx::new(container, endian);
        let count = usize::from(header.e_phnum);
        let table = read_up_to(file, header.e_phoff, count * ProgramHeader::size(context))?;
        let Ok(segments) = ProgramHeader::parse(&table, 0, count, context) else { return Ok(None) };

        let abi = Abi {
            wide: container == Container::Big,
            little_endian: endian == Endian::Little,
            machine: header.e_machine,
        };
        let interpreter = match segments.iter().find(|segment| segment.p_type == PT_INTERP) {
            Some(segment) => Some(interpreter_path(file, segment)?),
            None => None,
        };
        Ok(Some(Self { abi, interpreter }))
    }

    /// Whether the program runs on musl, whose loader would load the library but not the glibc it needs.
    pub(crate) fn is_musl(&self) -> bool {
        let name = self.interpreter.as_deref().and_then(|path| path.file_name());
        name.is_some_and(|name| name.as_bytes().starts_with(b"ld-musl-"))
    }
}

fn interpreter_path(file: &File, segment: &ProgramHeader) -> io::Result<PathBuf> {
    let length = usize::try_from(segment.p_filesz.min(INTERPRETER_BYTES)).map_err(io::Error::other)?;
    let bytes = read_up_to(file, segment.p_offset, length)?;
    let path = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(PathBuf::from(OsStr::from_bytes(path)))
}

/// Reads `length` bytes at `offset`, fewer if the file ends before.
pub(crate) fn read_up_to(file: &File, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut bytes[filled..], offset.saturating_add(filled as u64)) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write;

    fn file_with(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn this_very_program_is_dynamic_and_of_its_own_machine() {
        let image = Image::read(&File::open("/proc/self/exe").unwrap()).unwrap().unwrap();
        assert!(image.interpreter.as_ref().unwrap().is_absolute());
        assert!(image.abi.wide);
        assert_eq!(image.abi.little_endian, cfg!(target_endian = "little"));
        assert!(!image.is_musl());
    }

    #[test]
    fn text_and_cut_off_files_are_no_images() {
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert!(Image::read(&file_with(b"#!/bin/sh\n")).unwrap().is_none());
        assert!(Image::read(&file_with(b"")).unwrap().is_none());
        for length in [4, 16, 63, 64, 100] {
            assert!(Image::read(&file_with(&own[..length])).unwrap().is_none(), "{length} bytes");
        }
    }

    #[test]
    fn a_header_that_points_outside_the_file_is_no_image() {
        let mut own = std::fs::read("/proc/self/exe").unwrap();
        own[32..40].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert!(matches!(Image::read(&file_with(&own)), Ok(None) | Err(_)));
    }

    #[test]
    fn musl_is_known_by_its_loader() {
        let abi = Abi { wide: true, little_endian: true, machine: 62 };
        let with = |path: &str| Image { abi, interpreter: Some(path.into()) };
        assert!(with("/lib/ld-musl-x86_64.so.1").is_musl());
        assert!(!with("/lib64/ld-linux-x86-64.so.2").is_musl());
        assert_eq!(abi.to_string(), "64-bit X86_64");
    }
}
