# Sourced by the scripts beside it: the crate with its tests, and without what only examples and benchmarks depend on: cargo would build that for
# the tests too, with a sanitizer or for another processor.

# tests_only FOLDER : makes it there, of links. To be called from the root of the crate.
tests_only() {
  mkdir -p "$1"
  ln -sfn "$PWD/src" "$PWD/tests" "$PWD/README.md" "$PWD/SECURITY.md" "$1/"
  cp Cargo.lock "$1/"
  awk 'BEGIN { RS = ""; ORS = "\n\n" } !/^\[\[(example|bench)\]\]/' Cargo.toml |
    sed -E '/^(clap|criterion|epaint_default_fonts|indicatif|plotters) = /d' >"$1/Cargo.toml"
}
