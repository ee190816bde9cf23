//! The messages of CRIU's RPC, as far as gpucr uses them. The numbers are those of CRIU's
//! `rpc.proto`; fields that are not named here are skipped when read.

/// What a request asks for and a response answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum Kind {
    Empty = 0,
    Dump = 1,
    Restore = 2,
    Check = 3,
    Notify = 6,
    FeatureCheck = 9,
    Version = 10,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct InheritFdEntry {
    #[prost(string, required, tag = "1")]
    pub(super) key: String,
    #[prost(int32, required, tag = "2")]
    pub(super) fd: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Opts {
    /// Number of a descriptor of the process that made the socket; -1 for none.
    #[prost(int32, required, tag = "1")]
    pub(super) images_dir_fd: i32,
    #[prost(int32, optional, tag = "2")]
    pub(super) pid: Option<i32>,
    #[prost(bool, optional, tag = "3")]
    pub(super) leave_running: Option<bool>,
    #[prost(bool, optional, tag = "4")]
    pub(super) ext_unix_sk: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub(super) tcp_established: Option<bool>,
    #[prost(bool, optional, tag = "7")]
    pub(super) shell_job: Option<bool>,
    #[prost(bool, optional, tag = "8")]
    pub(super) file_locks: Option<bool>,
    #[prost(int32, optional, tag = "9")]
    pub(super) log_level: Option<i32>,
    #[prost(string, optional, tag = "10")]
    pub(super) log_file: Option<String>,
    #[prost(bool, optional, tag = "12")]
    pub(super) notify_scripts: Option<bool>,
    #[prost(string, optional, tag = "13")]
    pub(super) root: Option<String>,
    #[prost(int32, optional, tag = "17")]
    pub(super) work_dir_fd: Option<i32>,
    #[prost(bool, optional, tag = "18")]
    pub(super) link_remap: Option<bool>,
    #[prost(bool, optional, tag = "26")]
    pub(super) rst_sibling: Option<bool>,
    #[prost(message, repeated, tag = "27")]
    pub(super) inherit_fd: Vec<InheritFdEntry>,
    #[prost(string, repeated, tag = "31")]
    pub(super) skip_mnt: Vec<String>,
    /// 0 ignores control groups.
    #[prost(int32, optional, tag = "34")]
    pub(super) manage_cgroups_mode: Option<i32>,
    #[prost(uint32, optional, tag = "35")]
    pub(super) ghost_limit: Option<u32>,
    #[prost(string, repeated, tag = "37")]
    pub(super) external: Vec<String>,
    #[prost(uint32, optional, tag = "45")]
    pub(super) timeout: Option<u32>,
    #[prost(bool, optional, tag = "48")]
    pub(super) lazy_pages: Option<bool>,
    #[prost(bool, optional, tag = "52")]
    pub(super) tcp_close: Option<bool>,
    /// How connections are kept from the network: 1 iptables(8), 2 nftables, 3 not at all.
    #[prost(int32, optional, tag = "64")]
    pub(super) network_lock: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct FeatureSet {
    #[prost(bool, optional, tag = "1")]
    pub(super) mem_track: Option<bool>,
    #[prost(bool, optional, tag = "2")]
    pub(super) lazy_pages: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    pub(super) pidfd_store: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Request {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub(super) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) opts: Option<Opts>,
    #[prost(bool, optional, tag = "3")]
    pub(super) notify_success: Option<bool>,
    #[prost(message, optional, tag = "5")]
    pub(super) features: Option<FeatureSet>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RestoreResponse {
    #[prost(int32, required, tag = "1")]
    pub(super) pid: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Notification {
    #[prost(string, optional, tag = "1")]
    pub(super) script: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pub(super) pid: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct VersionResponse {
    #[prost(int32, required, tag = "1")]
    pub(super) major: i32,
    #[prost(int32, required, tag = "2")]
    pub(super) minor: i32,
    #[prost(int32, optional, tag = "4")]
    pub(super) sublevel: Option<i32>,
    /// A fourth number.
    #[prost(int32, optional, tag = "5")]
    pub(super) extra: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Response {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub(super) kind: i32,
    #[prost(bool, required, tag = "2")]
    pub(super) success: bool,
    #[prost(message, optional, tag = "4")]
    pub(super) restore: Option<RestoreResponse>,
    #[prost(message, optional, tag = "5")]
    pub(super) notify: Option<Notification>,
    #[prost(int32, optional, tag = "7")]
    pub(super) errno: Option<i32>,
    #[prost(message, optional, tag = "8")]
    pub(super) features: Option<FeatureSet>,
    #[prost(string, optional, tag = "9")]
    pub(super) message: Option<String>,
    #[prost(message, optional, tag = "10")]
    pub(super) version: Option<VersionResponse>,
}
