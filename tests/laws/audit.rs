//! The table of `SECURITY.md` names the files that have `unsafe`, and no others.

use std::collections::BTreeSet;
use std::path::Path;

/// Files below `folder` whose code says `unsafe`.
fn files_with_unsafe(root: &Path, folder: &str, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let name = format!("{folder}/{}", entry.unwrap().file_name().into_string().unwrap());
        if root.join(&name).is_dir() {
            files_with_unsafe(root, &name, found);
        } else if name.ends_with(".rs") {
            let source = std::fs::read_to_string(root.join(&name)).unwrap();
            let code = source.lines().map(|line| line.split("//").next().unwrap());
            if code.flat_map(|line| line.split(|c: char| c != '_' && !c.is_alphanumeric())).any(is_unsafe) {
                found.insert(name);
            }
        }
    }
}

fn is_unsafe(word: &str) -> bool {
    matches!(word, "unsafe" | "unsafe_code")
}

#[test]
fn the_audit_lists_every_file_with_unsafe() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = BTreeSet::new();
    files_with_unsafe(root, "src", &mut found);
    let audit = std::fs::read_to_string(root.join("SECURITY.md")).unwrap();
    let rows = audit.lines().filter_map(|line| line.strip_prefix("| `src/")?.split(" | ").next());
    let listed: BTreeSet<String> = rows
        .flat_map(|row| row.split(", "))
        .map(|name| format!("src/{}", name.trim_matches('`').trim_start_matches("src/")))
        .collect();
    assert_eq!(listed, found);
}
