//! Where the library is, and how it is named in `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// File name of the library.
pub(crate) const NAME: &str = "libthallus_shim.so";

/// Where it may lie, relative to the folder of the executable: a build tree, then an installation.
const FOLDERS: [&str; 3] = [".", "../lib", "../lib/thallus"];

/// The library that belongs to the executable at `executable`.
pub(crate) fn beside(executable: &Path) -> Option<PathBuf> {
    let folder = executable.parent()?;
    FOLDERS.iter().find_map(|place| folder.join(place).join(NAME).canonicalize().ok())
}

/// The folders that [`beside`] looks into, for an error message.
pub(crate) fn places(executable: &Path) -> String {
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let places: Vec<_> =
        FOLDERS.iter().map(|place| folder.join(place).components().as_path().display().to_string()).collect();
    places.join(", ")
}

/// The character of `library` that the loader would take as the end of its name, or expand, if any.
/// `LD_PRELOAD` knows no quoting; ld.so(8), "Dynamic string tokens" for the `$`.
pub(crate) fn unusable_character(library: &Path) -> Option<&'static str> {
    library.as_os_str().as_bytes().iter().find_map(|byte| match byte {
        b' ' => Some("a space"),
        b':' => Some("a colon"),
        b'$' => Some("a dollar sign"),
        _ => None,
    })
}

/// # Errors
/// `LD_PRELOAD` can't name the library.
pub(crate) fn check_path(library: &Path) -> anyhow::Result<()> {
    if let Some(character) = unusable_character(library) {
        anyhow::bail!(
            "{} can't be preloaded: its path has {character}, which LD_PRELOAD can't express",
            library.display()
        );
    }
    Ok(())
}

/// `LD_PRELOAD` with `library` in front of what is there already, but for a sanitizer's runtime; loaded once, however deeply
/// nested, and whatever folder another copy is in: two of them would both be in charge.
pub(crate) fn prepend(library: &Path, existing: Option<&OsStr>) -> OsString {
    let existing = existing.unwrap_or_default().as_bytes();
    let entries = existing.split(|byte| matches!(byte, b' ' | b':')).filter(|entry| !entry.is_empty());
    let others = entries.filter(|entry| file_name(entry) != NAME.as_bytes());
    let (mut all, behind): (Vec<_>, Vec<_>) = others.partition(|entry| is_sanitizer(file_name(entry)));
    all.push(library.as_os_str().as_bytes());
    all.extend(behind);
    OsStr::from_bytes(&all.join(&b':')).to_owned()
}

/// Whether it is the runtime of a sanitizer, of GCC or clang: such a one ends the program unless it is the first library.
fn is_sanitizer(name: &[u8]) -> bool {
    const NAMES: [&[u8]; 4] = [b"asan", b"tsan", b"lsan", b"ubsan"];
    let Some(name) = name.strip_prefix(b"lib") else { return false };
    let name = name.strip_prefix(b"clang_rt.").unwrap_or(name);
    NAMES.iter().any(|kind| {
        name.strip_prefix(*kind)
            .and_then(<[u8]>::first)
            .is_some_and(|next| matches!(next, b'.' | b'-' | b'_'))
    })
}

/// What follows the last slash.
fn file_name(entry: &[u8]) -> &[u8] {
    entry.rsplit(|&byte| byte == b'/').next().unwrap_or(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_preloaded_libraries_are_kept_behind_ours() {
        let library = Path::new("/opt/lib.so");
        let with = |existing: &str| prepend(library, Some(OsStr::new(existing))).into_string().unwrap();
        assert_eq!(prepend(library, None), "/opt/lib.so");
        assert_eq!(with(""), "/opt/lib.so");
        assert_eq!(with("/a.so"), "/opt/lib.so:/a.so");
        assert_eq!(with("/a.so /b.so: "), "/opt/lib.so:/a.so:/b.so");
    }

    #[test]
    fn our_library_is_named_once() {
        let library = Path::new("/opt/libthallus_shim.so");
        for other in [
            "/a.so:/opt/libthallus_shim.so:/b.so",
            "/usr/lib/thallus/libthallus_shim.so /a.so:libthallus_shim.so:/b.so",
            "/a.so:../libthallus_shim.so:/b.so:/opt/libthallus_shim.so",
        ] {
            let value = prepend(library, Some(OsStr::new(other)));
            assert_eq!(value, "/opt/libthallus_shim.so:/a.so:/b.so", "{other}");
        }
        let alike = "/a/libthallus_shim.so.1:/b/my-libthallus_shim.so:/libthallus_shim.so/c.so";
        let value = prepend(library, Some(OsStr::new(alike))).into_string().unwrap();
        assert_eq!(value, format!("/opt/libthallus_shim.so:{alike}"));
    }

    #[test]
    fn sanitizers_stay_in_front() {
        let with = |existing: &str| prepend(Path::new("/opt/lib.so"), Some(OsStr::new(existing)));
        assert_eq!(with("/lib/libasan.so.8"), "/lib/libasan.so.8:/opt/lib.so");
        assert_eq!(with("/a.so:libtsan.so /b.so"), "libtsan.so:/opt/lib.so:/a.so:/b.so");
        let clang = "/llvm/libclang_rt.asan-x86_64.so";
        assert_eq!(
            with(&format!("{clang}:/x/liblsan.so.0")),
            format!("{clang}:/x/liblsan.so.0:/opt/lib.so").as_str()
        );
        assert_eq!(with("/libasana.so"), "/opt/lib.so:/libasana.so");
    }

    #[test]
    fn paths_that_the_loader_would_take_apart_are_noticed() {
        assert_eq!(unusable_character(Path::new("/opt/lib.so")), None);
        assert_eq!(unusable_character(Path::new("/my files/lib.so")), Some("a space"));
        assert_eq!(unusable_character(Path::new("/a:b/lib.so")), Some("a colon"));
        assert_eq!(unusable_character(Path::new("/$LIB/lib.so")), Some("a dollar sign"));
    }
}
