//! Pages to read: how to do what ([`tasks`]), how to come from another library ([`migration`]), questions and answers ([`faq`]), and how it
//! works ([`algorithm`]). There is nothing to call here.

pub mod algorithm;
pub mod faq;
pub mod migration;
pub mod tasks;
