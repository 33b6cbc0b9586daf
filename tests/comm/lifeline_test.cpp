#include "longspan/comm/detail/lifeline.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>

namespace longspan {
namespace {

using std::chrono::milliseconds;

/// A process that listens, and another one that it forked, which lives on.
struct Listener {
  pid_t process = 0;
  std::string address;
  int child_lives = -1;  // closed when the child ends

  static Listener start() {
    std::array<int, 2> words{}, life{};
    EXPECT_EQ(pipe(words.data()), 0);
    EXPECT_EQ(pipe(life.data()), 0);
    Listener made;
    made.process = fork();
    if (made.process == 0) {
      setenv("GLOO_SOCKET_IFNAME", "lo", 1);
      const std::string address = Lifeline::address() + "\n";
      if (fork() == 0) {
        // Until the test closes its end.
        close(life[1]);
        char nothing = 0;
        _exit(read(life[0], &nothing, 1) == 0 ? 0 : 1);
      }
      close(life[0]);
      close(life[1]);
      // Only now, so that the child is there when this process is killed.
      if (write(words[1], address.data(), address.size()) <= 0) _exit(1);
      for (;;) pause();
    }
    close(life[0]);
    made.child_lives = life[1];
    char c = 0;
    while (read(words[0], &c, 1) == 1 && c != '\n') made.address += c;
    close(words[0]);
    close(words[1]);
    return made;
  }

  void kill_it() const {
    kill(process, SIGKILL);
    waitpid(process, nullptr, 0);
  }
};

bool ends_soon(Lifeline& line) {
  for (int i = 0; i < 100 && !line.is_gone(); ++i) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  return line.is_gone();
}

TEST(Lifeline, IsCutWhenItsProcessEndsThoughAChildOfItLivesOn) {
  const Listener listener = Listener::start();
  const auto line = Lifeline::to(listener.address, milliseconds(1000));
  ASSERT_NE(line, nullptr);
  EXPECT_EQ(line, Lifeline::to(listener.address, milliseconds(1000)));
  EXPECT_FALSE(line->is_gone());
  listener.kill_it();
  EXPECT_TRUE(ends_soon(*line));
  EXPECT_EQ(Lifeline::to("", milliseconds(10)), nullptr);
  close(listener.child_lives);
}

TEST(Lifeline, OneProcessHasOneAddress) {
  EXPECT_EQ(Lifeline::address(), Lifeline::address());
}

TEST(Lifeline, WhoNeverAnsweredIsNotGone) {
  // Nobody listens at port 1, and 192.0.2.0 is nobody's network.
  EXPECT_EQ(Lifeline::to("127.0.0.1 1", milliseconds(100)), nullptr);
  EXPECT_EQ(Lifeline::to("192.0.2.1 9", milliseconds(100)), nullptr);
  EXPECT_EQ(Lifeline::to("no address", milliseconds(100)), nullptr);
}

}  // namespace
}  // namespace longspan
