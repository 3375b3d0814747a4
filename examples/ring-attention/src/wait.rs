//! Messages under way, and waiting for them with a time limit.

use std::fmt;
use std::time::{Duration, Instant};

use mpi::Rank;
use mpi::datatype::Equivalence;
use mpi::request::{LocalScope, Request, Scope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};

use crate::error::Silence;

/// How long a rank waits for the others unless told otherwise: longer than any of them computes between two messages.
pub const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(300);

/// The ranks that compute together: a communicator of their own, so that their messages meet no others.
pub struct Ring {
    pub(crate) comm: SimpleCommunicator,
    pub(crate) time_limit: Duration,
}

impl Ring {
    /// The ranks of a communicator; all of them must call this.
    pub fn new(comm: &impl Communicator) -> Self {
        Self { comm: comm.duplicate(), time_limit: DEFAULT_TIME_LIMIT }
    }

    /// Sets how long a rank waits for a message before it ends the job: longer than another may be late.
    pub fn with_time_limit(mut self, time_limit: Duration) -> Self {
        self.time_limit = time_limit;
        self
    }

    /// This process.
    pub fn rank(&self) -> usize {
        self.comm.rank() as usize
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.comm.size() as usize
    }

    /// Ends the job: what MPI was given of our memory cannot be taken back, so there is no returning.
    pub(crate) fn abort(&self, error: &dyn std::fmt::Display) -> ! {
        eprintln!("{error}");
        self.comm.abort(1)
    }

    /// Waits for one request, of whatever kind.
    pub(crate) fn finish<'a, D: ?Sized, S: Scope<'a>>(&self, mut request: Request<'a, D, S>, what: &str) {
        let started = Instant::now();
        loop {
            request = match request.test() {
                Ok(_) => return,
                Err(request) => request,
            };
            if started.elapsed() > self.time_limit {
                self.abort(&self.silence(what.to_owned()));
            }
            std::thread::yield_now(); // there may be more ranks than cores
        }
    }

    fn silence(&self, what: String) -> Silence {
        Silence { rank: self.rank(), seconds: self.time_limit.as_secs(), what }
    }
}

/// Messages of one step, both ways.
pub(crate) struct Messages<'a, 'scope, W: Equivalence> {
    ring: &'scope Ring,
    scope: &'scope LocalScope<'a>,
    requests: Vec<(Way, Request<'a, [W], &'scope LocalScope<'a>>)>,
}

/// Whose doing a message waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    From(usize),
    To(usize),
}

impl<'a, 'scope, W: Equivalence> Messages<'a, 'scope, W> {
    pub(crate) fn new(ring: &'scope Ring, scope: &'scope LocalScope<'a>) -> Self {
        Self { ring, scope, requests: Vec::new() }
    }

    /// Begins to send to a rank. Messages between two ranks arrive in the order in which they were begun.
    pub(crate) fn send(&mut self, to: usize, words: &'a [W]) {
        let request = self.ring.comm.process_at_rank(to as Rank).immediate_send(self.scope, words);
        self.requests.push((Way::To(to), request));
    }

    /// Begins to receive from a rank: exactly so many words.
    pub(crate) fn receive(&mut self, from: usize, words: &'a mut [W]) {
        let request = self.ring.comm.process_at_rank(from as Rank).immediate_receive_into(self.scope, words);
        self.requests.push((Way::From(from), request));
    }

    /// Lets MPI work: it does nothing for a large message but in a call.
    pub(crate) fn progress(&mut self) {
        let requests = std::mem::take(&mut self.requests);
        self.requests = requests.into_iter().filter_map(|(way, request)| Some((way, request.test().err()?))).collect();
    }

    /// Waits for the rest, and says of what they are a part where the time limit passes. Gives the time that it took.
    pub(crate) fn finish(mut self, what: impl FnOnce() -> String) -> Duration {
        let started = Instant::now();
        loop {
            self.progress();
            if self.requests.is_empty() {
                return started.elapsed();
            }
            if started.elapsed() > self.ring.time_limit {
                let mut whom: Vec<_> = self.requests.iter().map(|(way, _)| way.to_string()).collect();
                whom.dedup();
                self.ring.abort(&self.ring.silence(format!("{} ({})", whom.join(" and "), what())));
            }
            std::thread::yield_now(); // there may be more ranks than cores
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::From(rank) => write!(f, "a message from rank {rank}"),
            Self::To(rank) => write!(f, "rank {rank} to take a message"),
        }
    }
}
