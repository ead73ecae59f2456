//! The version, as an ELF note (elf(5), "Notes"): `thallus doctor` reads it without loading the library.

const VERSION: &[u8] = env!("CARGO_PKG_VERSION").as_bytes();

#[repr(C, align(4))]
struct Note {
    name_bytes: u32,
    version_bytes: u32,
    kind: u32,
    name: [u8; 8],
    version: [u8; VERSION.len()],
}

// The linker keeps notes, whoever refers to them.
#[used]
#[unsafe(link_section = ".note.thallus")]
static NOTE: Note = Note {
    name_bytes: 8,
    version_bytes: VERSION.len() as u32,
    kind: 1,
    name: *b"Thallus\0",
    version: {
        let mut version = [0; VERSION.len()];
        version.copy_from_slice(VERSION);
        version
    },
};
