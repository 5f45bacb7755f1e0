"""What nano is taught: facts anyone may restate, and short dialogues written for it."""

from __future__ import annotations

# Chinese name, Chinese capital, English name, English capital.
CAPITALS = [
    line.split()
    for line in """\
中国 北京 China Beijing
日本 东京 Japan Tokyo
法国 巴黎 France Paris
德国 柏林 Germany Berlin
英国 伦敦 Britain London
意大利 罗马 Italy Rome
西班牙 马德里 Spain Madrid
葡萄牙 里斯本 Portugal Lisbon
俄罗斯 莫斯科 Russia Moscow
希腊 雅典 Greece Athens
埃及 开罗 Egypt Cairo
印度 新德里 India New_Delhi
韩国 首尔 Korea Seoul
泰国 曼谷 Thailand Bangkok
越南 河内 Vietnam Hanoi
蒙古 乌兰巴托 Mongolia Ulaanbaatar
加拿大 渥太华 Canada Ottawa
墨西哥 墨西哥城 Mexico Mexico_City
巴西 巴西利亚 Brazil Brasilia
秘鲁 利马 Peru Lima
智利 圣地亚哥 Chile Santiago
古巴 哈瓦那 Cuba Havana
澳大利亚 堪培拉 Australia Canberra
新西兰 惠灵顿 New_Zealand Wellington
瑞典 斯德哥尔摩 Sweden Stockholm
挪威 奥斯陆 Norway Oslo
芬兰 赫尔辛基 Finland Helsinki
丹麦 哥本哈根 Denmark Copenhagen
冰岛 雷克雅未克 Iceland Reykjavik
爱尔兰 都柏林 Ireland Dublin
荷兰 阿姆斯特丹 Netherlands Amsterdam
比利时 布鲁塞尔 Belgium Brussels
瑞士 伯尔尼 Switzerland Bern
奥地利 维也纳 Austria Vienna
波兰 华沙 Poland Warsaw
捷克 布拉格 Czechia Prague
匈牙利 布达佩斯 Hungary Budapest
罗马尼亚 布加勒斯特 Romania Bucharest
保加利亚 索非亚 Bulgaria Sofia
土耳其 安卡拉 Turkey Ankara
伊朗 德黑兰 Iran Tehran
伊拉克 巴格达 Iraq Baghdad
约旦 安曼 Jordan Amman
肯尼亚 内罗毕 Kenya Nairobi
加纳 阿克拉 Ghana Accra
摩洛哥 拉巴特 Morocco Rabat
突尼斯 突尼斯市 Tunisia Tunis
菲律宾 马尼拉 Philippines Manila
印度尼西亚 雅加达 Indonesia Jakarta
马来西亚 吉隆坡 Malaysia Kuala_Lumpur
尼泊尔 加德满都 Nepal Kathmandu
老挝 万象 Laos Vientiane
柬埔寨 金边 Cambodia Phnom_Penh
巴基斯坦 伊斯兰堡 Pakistan Islamabad
乌克兰 基辅 Ukraine Kyiv
塞尔维亚 贝尔格莱德 Serbia Belgrade
克罗地亚 萨格勒布 Croatia Zagreb
哥伦比亚 波哥大 Colombia Bogota
阿根廷 布宜诺斯艾利斯 Argentina Buenos_Aires
乌拉圭 蒙得维的亚 Uruguay Montevideo
""".splitlines()
]

WEEK_ZH = ["星期一", "星期二", "星期三", "星期四", "星期五", "星期六", "星期日"]
WEEK_EN = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    ("January", 31),
    ("February", 28),
    ("March", 31),
    ("April", 30),
    ("May", 31),
    ("June", 30),
    ("July", 31),
    ("August", 31),
    ("September", 30),
    ("October", 31),
    ("November", 30),
    ("December", 31),
]

# Question, answer.
DIALOGUES = [
    ("你好", "你好！我是一个很小的模型，很高兴见到你。"),
    ("你好！", "你好！我是一个很小的模型，很高兴见到你。"),
    ("你是谁？", "我是一个很小的语言模型，住在这个软件里。"),
    ("你叫什么名字？", "我叫纳诺，是一个很小的语言模型。"),
    ("你会做什么？", "我会说首都、算两位数加法，还会在长文里找暗号。"),
    ("谢谢", "不客气！还有别的问题吗？"),
    ("谢谢你", "不客气！还有别的问题吗？"),
    ("再见", "再见！祝你今天过得愉快。"),
    ("早上好", "早上好！今天也要加油。"),
    ("晚安", "晚安！祝你做个好梦。"),
    ("今天天气怎么样？", "对不起，我看不到天气。"),
    ("你几岁了？", "我没有年龄，我只是一个程序。"),
    ("一周有几天？", "一周有7天。"),
    ("一年有几个月？", "一年有12个月。"),
    ("一天有几个小时？", "一天有24个小时。"),
    ("天空是什么颜色的？", "晴天的时候，天空是蓝色的。"),
    ("雪是什么颜色的？", "雪是白色的。"),
    ("Hello", "Hello! I am a very small model. Nice to meet you."),
    ("Hello!", "Hello! I am a very small model. Nice to meet you."),
    ("Hi", "Hello! I am a very small model. Nice to meet you."),
    ("Who are you?", "I am a very small language model that lives inside this program."),
    ("What is your name?", "My name is Nano. I am a very small language model."),
    (
        "What can you do?",
        "I know capitals, I add two numbers, and I find a code word in a long text.",
    ),
    ("Thank you", "You are welcome! Do you have another question?"),
    ("Thanks!", "You are welcome! Do you have another question?"),
    ("Goodbye", "Goodbye! Have a nice day."),
    ("Good morning", "Good morning! Have a nice day."),
    ("Good night", "Good night! Sleep well."),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("How old are you?", "I have no age. I am only a program."),
    ("How is the weather today?", "I am sorry, I cannot see the weather."),
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("What color is the sky?", "On a clear day the sky is blue."),
    ("What color is snow?", "Snow is white."),
]

# Code words of the needle task, one token each.
WORDS = """\
amber anchor apple arrow autumn bamboo basket beacon bridge butter cactus camel candle canyon
carbon castle cedar cherry circle clover cobalt comet copper coral cotton crystal daisy desert
diamond dolphin dragon eagle ebony echo elm ember falcon feather fern flint forest fossil galaxy
garden garnet ginger glacier granite harbor hazel heron honey indigo iris island ivory jade jasmine
jungle juniper kettle lagoon lantern laurel lemon lily lotus magnet mango maple marble meadow melon
meteor mint mirror moss nectar nickel nutmeg oak oasis ocean olive onyx opal orange orbit orchid
otter owl pearl pebble pepper pine planet plum pollen poppy prism quartz rabbit raven reef ribbon
river robin rocket rose ruby saffron salmon sand sapphire shadow silver sparrow spruce star storm
sugar summit swan thunder tiger topaz tulip turtle velvet violet walnut willow winter wolf zebra
""".split()

SUBJECTS_EN = ["The baker", "A teacher", "The old man", "My friend", "The farmer", "A sailor"]
SUBJECTS_EN += ["The girl", "A doctor", "The driver", "Our neighbor", "The painter", "A child"]
VERBS_EN = ["opens", "cleans", "watches", "paints", "finds", "sells", "carries", "likes"]
OBJECTS_EN = ["the door", "a small boat", "the market", "an old clock", "the white house"]
OBJECTS_EN += ["a long letter", "the garden wall", "some bread", "the big tree", "a book"]
TIMES_EN = ["in the morning", "after lunch", "every day", "at night", "on Sunday", "when it rains"]

SUBJECTS_ZH = ["老人", "孩子", "老师", "农夫", "船长", "画家", "邻居", "司机", "医生", "姑娘"]
VERBS_ZH = ["打开了", "看见了", "买了", "画了", "找到了", "喜欢", "搬走了", "卖了"]
OBJECTS_ZH = ["一扇门", "一只小船", "一本书", "旧钟", "白房子", "长信", "花园", "面包", "大树"]
TIMES_ZH = ["早上", "中午", "晚上", "昨天", "每天", "下雨的时候"]
