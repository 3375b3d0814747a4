//! The last words of a rank: [`print_error`].

use std::fmt::Display;
use std::io::{Write, stderr};
use std::time::{Duration, Instant};

/// How long a rank stays for the sake of its last words. `mpirun` takes microseconds where it has a core.
const MOST: Duration = Duration::from_secs(2);

/// Prints a line to stderr, in one piece, and returns when `mpirun` has read it.
///
/// `mpirun` kills all ranks as soon as one of them fails, and drops what it has not yet read from their pipes. So call this before whatever
/// ends a rank.
pub fn print_error(error: &dyn Display) {
    // A stderr that is closed must not be an error of its own.
    let _ = stderr().write_all(format!("{error}\n").as_bytes());
    let started = Instant::now();
    // Not a pipe but a file: nothing is unread, or the system does not say.
    while rustix::io::ioctl_fionread(stderr()).is_ok_and(|unread| unread > 0) && started.elapsed() < MOST {
        std::thread::sleep(Duration::from_millis(1));
    }
}
